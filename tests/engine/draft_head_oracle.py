"""Draft heads in eager PyTorch, written from their papers: no cache, no classes of transformers in EAGLE-3's."""

import json

import torch
from safetensors.torch import load_file, save_file
from torch import nn

LAYER_IDS = (0, 1, 2)


def rms(weight, x, eps=1e-6):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotated(x, positions, theta=10000.0):
    """Rotates [heads, n, dim] by `positions`, halves against halves."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin, first, second = angles.cos(), angles.sin(), x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def matrix(rows, columns, generator):
    return nn.Parameter(torch.randn(rows, columns, generator=generator) * 0.5 * columns**-0.5)


class Eagle3(nn.Module):
    """The head by the names of its checkpoint. Columns of its logits are the tokens `ids`."""

    def __init__(self, target, ids, heads=4, kv_heads=2):
        super().__init__()
        size, draw = target.config.hidden_size, torch.Generator().manual_seed(3)
        self.embed, self.target, self.ids = target.get_input_embeddings().weight.detach(), [target], ids
        self.heads, self.kv_heads, self.dim = heads, kv_heads, size // heads
        shapes = {
            "fc": (size, 3 * size),
            "midlayer.self_attn.q_proj": (heads * self.dim, 2 * size),
            "midlayer.self_attn.k_proj": (kv_heads * self.dim, 2 * size),
            "midlayer.self_attn.v_proj": (kv_heads * self.dim, 2 * size),
            "midlayer.self_attn.o_proj": (size, heads * self.dim),
            "midlayer.mlp.gate_proj": (2 * size, size),
            "midlayer.mlp.up_proj": (2 * size, size),
            "midlayer.mlp.down_proj": (size, 2 * size),
            "lm_head": (len(ids), size),
        }
        self.tensors = {f"{name}.weight": matrix(*shape, draw) for name, shape in shapes.items()}
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self.tensors[f"midlayer.{name}.weight"] = nn.Parameter(1 + 0.1 * torch.randn(size, generator=draw))
        self.tensors["norm.weight"] = nn.Parameter(1 + 0.1 * torch.randn(size, generator=draw))
        for index, each in enumerate(self.tensors.values()):
            self.register_parameter(f"p{index}", each)

    def captured(self, ids):
        states = self.target[0](torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in LAYER_IDS], dim=-1) @ self.tensors["fc.weight"].T

    def layer(self, hidden, tokens):
        """Hidden states [n, size] of the head, from those in front of `tokens`."""
        w, n = self.tensors, len(tokens)
        both = torch.cat(
            (
                rms(w["midlayer.input_layernorm.weight"], self.embed[torch.tensor(tokens)]),
                rms(w["midlayer.hidden_norm.weight"], hidden),
            ),
            dim=-1,
        )
        q, k, v = (
            (both @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(n, -1, self.dim).transpose(0, 1)
            for name in "qkv"
        )
        q, k = rotated(q, torch.arange(n)), rotated(k, torch.arange(n))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * self.dim**-0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
        hidden = hidden + attended @ w["midlayer.self_attn.o_proj.weight"].T
        normed = rms(w["midlayer.post_attention_layernorm.weight"], hidden)
        gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        return hidden + (nn.functional.silu(normed @ gate) * (normed @ up)) @ down

    def logits(self, hidden):
        return rms(self.tensors["norm.weight"], hidden) @ self.tensors["lm_head.weight"].T

    def save(self, folder, **settings):
        """Writes the head as SafeAILab's EAGLE and SpecForge do."""
        folder.mkdir(exist_ok=True)
        config = self.target[0].config
        content = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": 2 * config.hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": len(self.ids),
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "eagle_aux_hidden_state_layer_ids": list(LAYER_IDS),
        }
        (folder / "config.json").write_text(json.dumps({**content, **settings}))
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[self.ids] = True
        tensors = {name: each.detach().clone() for name, each in self.tensors.items()}
        tensors |= {"d2t": self.ids - torch.arange(len(self.ids)), "t2d": known}
        save_file(tensors, folder / "model.safetensors")
        return folder


class Mtp(nn.Module):
    """DeepSeek-V3's prediction layer: the last layer of `deeper`, whose others are the served model's."""

    def __init__(self, deeper):
        super().__init__()
        self.deeper, size = [deeper], deeper.config.hidden_size
        draw = torch.Generator().manual_seed(4)
        self.number = deeper.config.num_hidden_layers - 1
        self.ids = torch.arange(deeper.config.vocab_size)
        names = ("enorm", "hnorm", "shared_head.norm")
        self.tensors = {f"{name}.weight": nn.Parameter(1 + 0.1 * torch.randn(size, generator=draw)) for name in names}
        self.tensors["eh_proj.weight"] = matrix(size, 2 * size, draw)
        self.tensors["shared_head.head.weight"] = nn.Parameter(deeper.lm_head.weight.detach().clone())
        for index, each in enumerate(self.tensors.values()):
            self.register_parameter(f"p{index}", each)

    def captured(self, ids):
        model = self.deeper[0].model
        model.config.num_hidden_layers = self.number
        try:
            return model(torch.tensor([ids])).last_hidden_state[0]
        finally:
            model.config.num_hidden_layers = self.number + 1

    def layer(self, hidden, tokens):
        w, model, n = self.tensors, self.deeper[0].model, len(tokens)
        embeds = model.embed_tokens(torch.tensor(tokens))
        both = torch.cat((rms(w["enorm.weight"], embeds), rms(w["hnorm.weight"], hidden)), dim=-1)
        mask = torch.zeros(n, n).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)[None, None]
        rope = model.rotary_emb(both[None], torch.arange(n)[None])
        out = model.layers[self.number](
            (both @ w["eh_proj.weight"].T)[None], attention_mask=mask, position_embeddings=rope
        )
        return (out[0] if isinstance(out, tuple) else out)[0]

    def logits(self, hidden):
        return rms(self.tensors["shared_head.norm.weight"], hidden) @ self.tensors["shared_head.head.weight"].T

    def save(self, folder):
        """Writes model and layer as DeepSeek-V3's checkpoint has them."""
        deeper = self.deeper[0]
        deeper.save_pretrained(folder)
        tensors, begin = load_file(folder / "model.safetensors"), f"model.layers.{self.number}"
        tensors |= {f"{begin}.{name}": each.detach().clone() for name, each in self.tensors.items()}
        tensors[f"{begin}.embed_tokens.weight"] = deeper.model.embed_tokens.weight.detach().clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        for name in ("layer_types", "mlp_layer_types", "indexer_types"):
            if config.get(name) is not None:
                config[name] = config[name][: self.number]
        config |= {"num_hidden_layers": self.number, "num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))
        return folder


class PrefixedMtp(nn.Module):
    """Qwen3-Next's prediction layer, by the names of its checkpoint, with a dense product or experts."""

    def __init__(self, target):
        super().__init__()
        config, draw = target.config.get_text_config(), torch.Generator().manual_seed(5)
        self.config, self.target, size = config, [target], config.hidden_size
        self.num_experts = getattr(config, "num_experts", 0)
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.ids = torch.arange(config.vocab_size)
        shapes = {
            "fc": (size, 2 * size),
            "layers.0.self_attn.q_proj": (2 * self.heads * self.dim, size),  # queries and gates, head by head
            "layers.0.self_attn.k_proj": (self.kv_heads * self.dim, size),
            "layers.0.self_attn.v_proj": (self.kv_heads * self.dim, size),
            "layers.0.self_attn.o_proj": (size, self.heads * self.dim),
        }
        if self.num_experts:
            shapes |= {"layers.0.mlp.gate": (self.num_experts, size), "layers.0.mlp.shared_expert_gate": (1, size)}
            inner = {f"experts.{index}.": config.moe_intermediate_size for index in range(self.num_experts)}
            inner["shared_expert."] = config.shared_expert_intermediate_size
        else:
            inner = {"": config.intermediate_size}
        for name, columns in inner.items():
            shapes |= {f"layers.0.mlp.{name}{each}_proj": (columns, size) for each in ("gate", "up")}
            shapes[f"layers.0.mlp.{name}down_proj"] = size, columns
        self.tensors = {f"{name}.weight": matrix(*shape, draw) for name, shape in shapes.items()}
        norms = {"pre_fc_norm_embedding": size, "pre_fc_norm_hidden": size, "norm": size}
        norms |= {"layers.0.input_layernorm": size, "layers.0.post_attention_layernorm": size}
        norms |= {"layers.0.self_attn.q_norm": self.dim, "layers.0.self_attn.k_norm": self.dim}
        for name, columns in norms.items():  # which are centred at zero
            self.tensors[f"{name}.weight"] = nn.Parameter(0.1 * torch.randn(columns, generator=draw))
        for index, each in enumerate(self.tensors.values()):
            self.register_parameter(f"p{index}", each)

    def captured(self, ids):
        target = self.target[0]
        return target(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]

    def normed(self, name, x):
        return rms(1 + self.tensors[f"{name}.weight"], x, self.config.rms_norm_eps)

    def product(self, name, x):
        return x @ self.tensors[f"{name}.weight"].T

    def layer(self, hidden, tokens):
        n, embeds = len(tokens), self.target[0].get_input_embeddings().weight.detach()[torch.tensor(tokens)]
        both = self.normed("pre_fc_norm_embedding", embeds), self.normed("pre_fc_norm_hidden", hidden)
        out = self.product("fc", torch.cat(both, dim=-1))
        x = self.normed("layers.0.input_layernorm", out)
        attn = "layers.0.self_attn"
        q, gate = self.product(f"{attn}.q_proj", x).view(n, self.heads, 2 * self.dim).chunk(2, dim=-1)
        k, v = (self.product(f"{attn}.{name}_proj", x).view(n, -1, self.dim) for name in "kv")
        part = int(self.dim * self.config.rope_parameters["partial_rotary_factor"])
        theta, places = self.config.rope_parameters["rope_theta"], torch.arange(n)
        q, k = (self.normed(f"{attn}.{name}_norm", each).transpose(0, 1) for name, each in (("q", q), ("k", k)))
        q, k = (torch.cat((rotated(x[..., :part], places, theta), x[..., part:]), dim=-1) for x in (q, k))
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=0) for x in (k, v.transpose(0, 1)))
        scores = (q @ k.transpose(1, 2) * self.dim**-0.5).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1) * gate.sigmoid()
        out = out + self.product(f"{attn}.o_proj", attended.reshape(n, -1))
        x = self.normed("layers.0.post_attention_layernorm", out)
        return self.normed("norm", out + (self.experts(x) if self.num_experts else self.gated("layers.0.mlp.", x)))

    def gated(self, name, x):
        inner = nn.functional.silu(self.product(f"{name}gate_proj", x)) * self.product(f"{name}up_proj", x)
        return self.product(f"{name}down_proj", inner)

    def experts(self, x):
        chances, chosen = self.product("layers.0.mlp.gate", x).softmax(-1).topk(self.config.num_experts_per_tok)
        share = torch.zeros(len(x), self.num_experts).scatter(1, chosen, chances / chances.sum(-1, keepdim=True))
        parts = [self.gated(f"layers.0.mlp.experts.{index}.", x) for index in range(self.num_experts)]
        shared = self.gated("layers.0.mlp.shared_expert.", x)
        routed = sum(part * share[:, index, None] for index, part in enumerate(parts))
        return routed + self.product("layers.0.mlp.shared_expert_gate", x).sigmoid() * shared

    def logits(self, hidden):
        return hidden @ self.target[0].get_output_embeddings().weight.detach().T

    def save(self, folder):
        """Writes model and layer as Qwen3-Next's checkpoint has them."""
        self.target[0].save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors |= {f"mtp.{name}": each.detach().clone() for name, each in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


@torch.no_grad()
def proposals(head, ids, num_drafts):
    """The tokens that a head proposes behind `ids`."""
    hidden, tokens, found = head.captured(ids[:-1]), list(ids[1:]), []
    for _ in range(num_drafts):
        own = head.layer(hidden, tokens)[-1:]
        found.append(int(head.ids[head.logits(own)[0].argmax()]))
        hidden, tokens = torch.cat((hidden, own)), [*tokens, found[-1]]
    return found


def trained(head, texts, num_steps=40):
    """Returns the head after it has learned the next tokens of `texts`, with its own hidden states for the second."""
    column = {token: index for index, token in enumerate(head.ids.tolist())}
    with torch.no_grad():
        states = [head.captured(text).detach() for text in texts]
    if hasattr(head, "embed"):  # its own projection is learned, too
        states = [None] * len(texts)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(num_steps):
        loss = 0.0
        for text, state in zip(texts, states, strict=True):
            hidden = head.captured(text) if state is None else state
            own = head.layer(hidden[:-2], text[1:-1])
            again = head.layer(torch.cat((hidden[:1], own[:-1])), text[1:-1])
            wanted = torch.tensor([column.get(token, -100) for token in text[2:]])
            loss = loss + sum(nn.functional.cross_entropy(head.logits(each), wanted) for each in (own, again))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head
