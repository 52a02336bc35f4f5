"""Adapters of peft with random matrices, and what eager peft makes of a prompt with one of them, unmerged."""

import copy
import warnings

import torch
from peft import LoraConfig, get_peft_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class PeftModels:
    """A base model with adapters by name; each is written to a folder of its own.

    `configs` are LoraConfig's arguments by name of the adapter.
    """

    def __init__(self, base, root, configs):
        self.root, self.names, self._known = root, list(configs), {}
        self._model = None
        for number, (name, config) in enumerate(configs.items()):
            torch.manual_seed(number)
            options = {"lora_alpha": 16, "init_lora_weights": False, "target_modules": ATTENTION, **config}
            made = LoraConfig(task_type="CAUSAL_LM", **options)
            if self._model is None:
                self._model = get_peft_model(base, made, adapter_name=name).eval()
            else:
                self._model.add_adapter(name, made)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of embeddings, which are saved in full
            self._model.save_pretrained(root)

    def folder(self, name):
        return self.root / name

    def folders(self, *names):
        return {name: self.folder(name) for name in names or self.names}

    def tokens(self, name, prompt, num_new):
        """New tokens of greedy decoding in eager PyTorch; of the base where the name is None."""
        key = name, tuple(prompt), num_new
        if key not in self._known:
            ids = torch.tensor([list(prompt)])
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            self._known[key] = self._generated(name, inputs, max_new_tokens=num_new)[0, len(prompt) :].tolist()
        return self._known[key]

    def media_tokens(self, name, inputs, num_new):
        """The same of a prompt by argument of ``generate``, and exactly so many."""
        sizes = {"max_new_tokens": num_new, "min_new_tokens": num_new}
        return self._generated(name, copy.deepcopy(inputs), **sizes)[0, -num_new:].tolist()

    def _generated(self, name, inputs, **options):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name is None:
                with self._model.disable_adapter():
                    return self._model.generate(**inputs, do_sample=False, **options)
            self._model.set_adapter(name)
            return self._model.generate(**inputs, do_sample=False, **options)


def ranks(number):
    """Configurations of adapters of several ranks; some with the scale of rsLoRA, some with one of the first layer."""
    first = {r".*\.0\..*": 9.5}
    return {
        f"a{i}": {"r": 1 + i, "use_rslora": i % 3 == 0, "lora_alpha": 4 + i, "alpha_pattern": first if i % 2 else {}}
        for i in range(number)
    }
