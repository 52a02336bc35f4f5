"""Names processors by what they multiply with: figures of one kind say nothing about another."""

from __future__ import annotations

from pathlib import Path

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimddp", "i8mm")
"""What products are made of, as Linux names it."""


def processor(cpuinfo: str | None = None) -> str:
    """Vendor, family, model and features of a processor, as Linux describes it; None: of this one."""
    if cpuinfo is None:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    fields = dict.fromkeys(("vendor_id", "cpu family", "model", "flags", "Features", "CPU part"), "")
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in fields and not fields[name.strip()]:
            fields[name.strip()] = value.strip()
    flags = f"{fields['flags']} {fields['Features']}".split()
    named = [fields[name] for name in ("vendor_id", "cpu family", "model", "CPU part") if fields[name]]
    return " ".join([*named, *(each for each in FEATURES if each in flags)])
