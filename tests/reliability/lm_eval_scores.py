"""lm-eval against a server and on transformers; a command, since it loads a model twice.

    pip install 'lm-eval[api,hf]'
    python tests/reliability/lm_eval_scores.py FOLDER

FOLDER is a checkpoint with a chat template, such as one that ``python tests/real/fetch.py`` unpacks. Two small tasks
are written here: questions with choices, scored by log-likelihoods (``local-completions``), and questions that are
answered in words (``local-completions`` and ``local-chat-completions``). Scores of the server must be those of ``hf``,
and so must the words; log-likelihoods may differ by 0.01. Each check prints a line; the exit status is the number of
those that failed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from server_process import Process
from texts import QUESTIONS

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{{target}}}}}"
"""
CHOICE = 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\nmetric_list:\n  - {metric: acc}\n'
WORDS = """\
output_type: generate_until
generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 12}
metric_list:
  - {metric: exact_match, ignore_case: true, ignore_punctuation: true}
"""


def write_tasks(folder):
    rows = [{"question": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS]
    rows = [{**row, "word": row["choices"][row["answer"]]} for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, target, rest in (("choice", "answer", CHOICE), ("words", "word", WORDS)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder, target=target) + rest)


def outcome(model, task, folder, **options):
    """The scores of a task, and the answer to each question: text, or log-likelihoods of choices."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, tasks=[task], task_manager=manager, log_samples=True, bootstrap_iters=0, **options)
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    scores = {name: value for name, value in found["results"][task].items() if isinstance(value, float)}
    return scores, [[each[0] for each in sample["resps"]] for sample in samples]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    failed = 0
    process = Process(str(folder), "--served-model-name", "model", "--dtype", "float32", "--max-model-len", "512")
    try:
        process.wait_until_ready(within_s=600)
        with tempfile.TemporaryDirectory() as scratch:
            write_tasks(Path(scratch))
            reference = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1, max_length=512)

            def check(kind, task, route, **options):
                nonlocal failed
                arguments = (
                    f"model=model,base_url={process.url}{route},tokenizer_backend=huggingface,tokenizer={folder},"
                )
                arguments += "max_length=512,num_concurrent=4,max_retries=1"
                expected = outcome(reference, task, Path(scratch), **options)
                found = outcome(kind, task, Path(scratch), model_args=arguments, **options)
                if task == "choice":
                    pairs = [
                        torch.tensor([[value for value, _ in row] for row in each[1]]) for each in (expected, found)
                    ]
                    same = (pairs[0] - pairs[1]).abs().max().item() < 0.01
                else:
                    same = found[1] == expected[1]
                is_well = same and found[0] == expected[0]
                failed += not is_well
                print(
                    f"{kind}, {task}: {found[0]} (hf: {expected[0]}), answers {'equal' if same else 'DIFFER'}",
                    flush=True,
                )
                if not same:
                    print(expected[1], found[1], sep="\n", flush=True)

            chat = {"apply_chat_template": True, "limit": 3}
            check("local-chat-completions", "words", "/v1/chat/completions", **chat)
            check("local-completions", "words", "/v1/completions", limit=3)
            check("local-completions", "choice", "/v1/completions")
    finally:
        process.stop()
    sys.exit(failed)


if __name__ == "__main__":
    main()
