"""The shipped results: complete for the pinned transformers, and what docs/models.md says."""

import re
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from model_adapters.loading.short_names import SHORT_NAMES
from parity_sweep import changed_types, checkpoints_table, models_page
from parity_sweep.page_section import RESULTS_PAGE
from torchax_serve.parity.known_failures import NOT_PACKED, OLDER
from torchax_serve.parity.result import Result
from torchax_serve.parity.tasks import CAUSAL, CHECKPOINTS, TASKS, all_shipped, shipped

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = {versions["transformers"]: results for versions, results in all_shipped()}


def test_results_are_of_the_types_that_transformers_has():
    installed = transformers.__version__
    if installed in SWEEPS:
        assert set(SWEEPS[installed]) == set(TASKS[CAUSAL].types())
    else:  # an older one than the newest that was swept: a newer one is swept before it is allowed
        assert Version(installed) < max(map(Version, SWEEPS))


def test_documents_are_generated_from_the_results():
    assert (ROOT / "docs" / "models.md").read_text() == models_page.document()
    assert (ROOT / RESULTS_PAGE).read_text() == models_page.tables()


@pytest.mark.parametrize("version", SWEEPS)
def test_passed_types_were_compared_with_clear_margins(version):
    for result in SWEEPS[version].values():
        if result.status == "passed":
            assert result.forward_difference <= 1e-4, result
            assert result.unbatched_equal, result
            assert result.padded_equal or (result.padded_equal is None and result.notes), result
            assert result.engine_equal or result.executor == "static", result
            assert result.smallest_gap > 2 * result.forward_difference, result
        else:
            differs = "differ" in models_page.describe_tokens(result) or (result.forward_difference or 0) > 1e-4
            assert result.error or differs, result


def test_types_with_states_run_packed_or_say_why_not():
    newest = SWEEPS[max(SWEEPS, key=Version)]
    with_states = {name for name, result in newest.items() if "state" in result.cache_kinds}
    assert {name for name in with_states if newest[name].executor != "packed"} == set(NOT_PACKED)


def test_types_named_in_a_diff():
    diff = """\
diff --git a/model_adapters/quirks/key_count.py b/model_adapters/quirks/key_count.py
--- a/model_adapters/quirks/key_count.py
+++ b/model_adapters/quirks/key_count.py
@@ -1 +1 @@
-QUIRK = Quirk(right_aligned_cache=True)
+QUIRK = Quirk(right_aligned_cache="llama")  # and not mistral
 "gemma2"
diff --git a/model_adapters/quirks/xlm_roberta.py b/model_adapters/quirks/xlm_roberta.py
--- a/model_adapters/quirks/xlm_roberta.py
+++ /dev/null
diff --git a/torchax_serve/parity/results/one.json b/torchax_serve/parity/results/one.json
--- a/torchax_serve/parity/results/one.json
+++ b/torchax_serve/parity/results/one.json
+ "t5"
"""
    types = ("gpt_neo", "mpt", "llama", "mistral", "gemma2", "xlm-roberta", "t5")
    assert changed_types.types_named_in(diff, types) == ["gpt_neo", "llama", "mpt", "xlm-roberta"]


def test_differences_between_transformers_versions():
    def passed(name, executor):
        return Result(name, "", status="passed", executor=executor)

    newest = {"a": passed("a", "packed"), "b": passed("b", "packed"), "c": passed("c", "packed")}
    older = {"a": passed("a", "packed"), "b": Result("b", "", error="no | such"), "old": passed("old", "packed")}
    text = models_page.markdown({"transformers": "2"}, newest, [({"transformers": "1", "jax": "3"}, older)])
    part = text.partition("## transformers 1\n")[2].partition("\n## ")[0]
    assert "2 of 3 types pass, with jax 3." in part
    assert "Not known there: `c`." in part and "Known there only: `old`." in part
    assert [line for line in part.splitlines() if line.startswith("| ")] == [
        "| type | 1 | 2 | cause |",
        "| b | failed | passed, packed | no \\| such |",
    ]


def test_causes_belong_to_types_with_another_outcome():
    newest = shipped()[1]
    for version, causes in OLDER.items():
        for name in causes:
            older = SWEEPS[version][name]
            assert (older.status, older.executor) != (newest[name].status, newest[name].executor), name


def test_sweep_of_the_installed_version():
    for version, results in SWEEPS.items():
        assert shipped(transformers=version)[1] == results
    assert shipped(transformers="0.1") == shipped()


def test_checkpoints_of_short_names_pass_and_written_configurations_are_marked():
    results = shipped(CHECKPOINTS)[1]
    named = [checkpoints_table.file_name(each.hub_id) for each in SHORT_NAMES.values()]
    assert {name: results[name].status for name in named} == dict.fromkeys(named, "passed")
    assert results.keys() >= checkpoints_table.WRITTEN
    text = checkpoints_table.section("", results, models_page.describe_tokens).table()
    marked = {checkpoints_table.file_name(name) for name in re.findall(r"^\| (\S+) † \|", text, re.MULTILINE)}
    assert marked == checkpoints_table.WRITTEN
