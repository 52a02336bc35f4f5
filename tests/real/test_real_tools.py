"""What people put around a model: chat templates, pipelines, lm-eval."""

import json

import pytest
import texts
import torch
import transformers
from conftest import Eager
from fetch import folder_of

from torchax_serve import SamplingParams, to_jax
from torchax_serve.text.chat import chat_prompt_ids


def test_chat_template(served, smollm2, found):
    for chat in texts.CHATS:
        expected = smollm2.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert chat_prompt_ids(served, chat) == expected
    prompt = chat_prompt_ids(served, texts.CHATS[0])
    expected = smollm2.tokenizer.decode(smollm2.new_tokens(prompt, 12), skip_special_tokens=True)
    params = SamplingParams(max_new_tokens=12, temperature=0)
    assert served.chat(texts.CHATS[0], params) == expected
    assert "".join(served.chat(texts.CHATS[0], params, stream=True)) == expected
    found("smollm2", "prompts of the chat template, answers of `chat`", "equal")


def test_text_generation_pipeline(served, smollm2, found):
    answers = []
    for model in (smollm2.model, served.torch_model):
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=smollm2.tokenizer)
        answers.append(pipe(texts.SHORT[:4], max_new_tokens=8, do_sample=False, batch_size=2))
        answers[-1].append(pipe(texts.CHATS[1], max_new_tokens=8, do_sample=False))
    assert answers[1] == answers[0]
    found("smollm2", "`transformers.pipeline`, texts in a padded batch and a chat", "equal")


def test_feature_extraction_pipeline(found):
    eager = Eager("minilm", transformers.AutoModel)
    on_jax = to_jax(transformers.AutoModel.from_pretrained(folder_of("minilm")))
    features = []
    for model in (eager.model, on_jax):
        pipe = transformers.pipeline("feature-extraction", model=model, tokenizer=eager.tokenizer)
        features.append(torch.tensor(pipe(texts.SHORT[0])))
    difference = (features[0] - features[1]).abs().max().item()
    assert difference < 1e-5
    found("minilm", "`transformers.pipeline`, features", f"within {difference:.0e}")


@pytest.mark.filterwarnings("default")  # lm-eval's own
def test_lm_eval(served, smollm2, tmp_path, found):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rows = [{"question": text, "choices": choices, "answer": answer} for text, choices, answer in texts.QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(
        "task: small_choice\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}, cache_dir: {tmp_path}/cache}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
        "metric_list:\n  - {metric: acc}\n"
    )
    outcomes = []
    for model in (smollm2.model, served.torch_model):
        backend = HFLM(pretrained=model, tokenizer=smollm2.tokenizer, batch_size=4, max_length=256)
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        outcome = simple_evaluate(
            backend, tasks=["small_choice"], task_manager=manager, log_samples=True, bootstrap_iters=0
        )
        scores = [[float(score) for ((score, _),) in row["resps"]] for row in outcome["samples"]["small_choice"]]
        outcomes.append((outcome["results"]["small_choice"]["acc,none"], torch.tensor(scores)))
    assert outcomes[1][0] == outcomes[0][0] >= 0.5
    torch.testing.assert_close(outcomes[1][1], outcomes[0][1], atol=1e-3, rtol=1e-4)
    found("smollm2", "lm-eval, 8 questions with 3 choices: accuracy (eager)", f"{outcomes[1][0]} ({outcomes[0][0]})")
