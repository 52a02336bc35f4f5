"""The table of real models: runs of parts add up, and another release of a library begins anew."""

from parity_sweep import real_models


def test_findings_of_runs_are_merged_and_documented(tmp_path, monkeypatch):
    path = tmp_path / "results" / "results.json"
    assert real_models.read(path) is None
    assert real_models.section(path) is None
    real_models.write({"a": {"tokens": "equal"}}, path)
    real_models.write({"a": {"memory": "1 GB"}, "b": {"tokens": "differ"}}, path)
    kept = real_models.read(path)["findings"]
    assert kept == {"a": {"tokens": "equal", "memory": "1 GB"}, "b": {"tokens": "differ"}}
    assert real_models.rows(kept) == [("a", "tokens", "equal"), ("a", "memory", "1 GB"), ("b", "tokens", "differ")]
    assert "| b | tokens | differ |" in real_models.section(path).table()
    monkeypatch.setattr(real_models, "version", lambda name: "0.0")
    real_models.write({"b": {"tokens": "equal"}}, path)
    assert real_models.read(path)["findings"] == {"b": {"tokens": "equal"}}
