"""Verify steps of a model that is a table of logits: requests of all kinds share them, and get what NumPy computes."""

import collections
import dataclasses
import functools
import types

import jax
import numpy as np

from model_adapters.caches.packed_batch import PagedLayout
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.engine.model_runner import MaskedRequests, ModelRunner
from torchax_serve.executors.base import ExecutorLimits
from torchax_serve.executors.packed.specs import PackedSpecs
from torchax_serve.executors.slot_adapters import SlotAdapters
from torchax_serve.executors.speculation.speculative_decode import SpeculativeDecoder
from torchax_serve.request_params import RequestParams
from torchax_serve.sampling.sampler import default_sharding
from torchax_serve.scheduler import CacheGroup, Request, Scheduler, SchedulerConfig, SpeculativeConfig

VOCAB, NUM_SLOTS, MAX_LEN, NUM_STEPS, NUM_NEW = 29, 4, 64, 4, 24
TABLE = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2
DRAFTS = SpeculativeConfig(num_speculative_tokens=3, adaptive=False)


class TableExecutor:
    """Executor of the model whose next logits are the last token's row of `TABLE`."""

    runs_ahead, num_programs, num_substitutes = True, 0, 0
    limits = ExecutorLimits(max_num_seqs=NUM_SLOTS, max_num_steps=NUM_STEPS)

    def __init__(self, config):
        self.cache = types.SimpleNamespace(pools=())
        programs = ExecutableCache()
        specs = PackedSpecs(
            layout=PagedLayout(groups=(0,), windows=(None,), max_len=MAX_LEN),
            pages_per_seq=MAX_LEN // 4,
            num_slots=NUM_SLOTS,
            decode_buckets=(NUM_SLOTS,),
            token_buckets=(32,),
            max_num_steps=NUM_STEPS,
            batch_invariant=False,
            has_rope_lens=False,
        )
        self._decoder = SpeculativeDecoder(
            config or DRAFTS,
            lambda weights, pools, batch, spec: (weights["table"][batch.token_ids], pools, None),
            {"table": jax.device_put(TABLE, default_sharding())},
            programs,
            functools.partial(CachedFunction, programs, is_pure=True),
            specs,
            pools=lambda: (),
            adapters=SlotAdapters(NUM_SLOTS, ""),
        )

    def assign(self, slot, source, adapter_id):
        pass

    def prepare(self, plan):
        pass

    def run(self, rows, tables, last_tokens, *, ahead=0):
        last, logits = np.asarray(last_tokens), np.zeros((NUM_SLOTS, VOCAB), np.float32)
        for index, row in enumerate(rows):
            logits[index] = TABLE[last[row.slot] if row.is_decode else row.token_ids[-1]]
        return jax.device_put(logits, default_sharding())

    def run_decode(self, plan, sampler, make_bitmask=None):
        if plan.drafts is None:
            return None
        results, _ = self._decoder.run(plan, sampler)
        return self._decoder.sample(plan, sampler, results, make_bitmask)


class Loop:
    """The engine's loop, a step ahead, without its threads."""

    def __init__(self, asked, config):
        groups = (CacheGroup("full", None, 65),)
        sizes = {"page_size": 4, "max_num_seqs": NUM_SLOTS, "max_model_len": MAX_LEN, "max_num_batched_tokens": 32}
        self.scheduler = Scheduler(SchedulerConfig(groups=groups, **sizes, max_num_steps=NUM_STEPS, speculative=config))
        self.runner = ModelRunner(TableExecutor(config), vocab_size=VOCAB, max_model_len=MAX_LEN)
        self.masked, self.asked, self.sent = MaskedRequests(VOCAB), asked, collections.deque()
        self.tokens, self.logprobs = [[] for _ in asked], [[] for _ in asked]
        for index, each in enumerate(asked):
            self.scheduler.add(dataclasses.replace(each, request_id=index))
            self.masked.add(index, each.masks)
        while len(self.scheduler) or self.sent:
            self.step()
            self.scheduler.check_integrity()

    def step(self):
        plan = self.scheduler.schedule(0.0)
        if plan is not None:
            requests = {row.slot: self.asked[row.request_id] for row in plan.prefill_rows}
            outputs = {row.slot: self.scheduler.find(row.request_id).output_ids for row in plan.prefill_rows}
            masks = self.masked.of(plan, self.scheduler.find, self.read_all)
            self.sent.append(self.runner.execute(plan, requests, outputs, masks))
        if len(self.sent) > 1 or plan is None:
            self.read()

    def read_all(self):
        # The plan that is being sent is not among them.
        while self.sent:
            self.read()

    def read(self):
        step = self.sent.popleft()
        for row in self.scheduler.commit(step.plan, self.runner.read(step), 0.0):
            self.tokens[row.request_id] += row.token_ids
            num_top = self.asked[row.request_id].params.logprobs
            if num_top is not None:
                self.logprobs[row.request_id] += self.runner.logprobs(step, row.row, len(row.token_ids), num_top)


def asked(prompt, masks=None, **options):
    params = RequestParams(max_new_tokens=NUM_NEW, **options)
    return dataclasses.replace(Request.of(prompt, params, masks=masks), cache_prompt=False)


class Banned:
    """Forbids one token behind every second one."""

    def __init__(self, token):
        self.token, self.seen = token, []

    def fill(self, bitmask, output_ids):
        self.seen.append(list(output_ids))
        if len(output_ids) % 2:
            bitmask[0] &= ~np.int32(1 << self.token)


def by_hand(prompt, banned=None, penalty=1.0):
    """Returns greedy tokens and their log-probabilities, which penalties do not change and masks do."""
    text, logprobs = list(prompt), []
    for index in range(NUM_NEW):
        logits = TABLE[text[-1]].astype(np.float64)
        if banned is not None and index % 2:
            logits[banned] = -np.inf
        scores = logits.copy()
        seen = sorted(set(text))
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
        token = int(scores.argmax())
        logprobs.append(logits[token] - np.log(np.exp(logits).sum()))
        text.append(token)
    return text[len(prompt) :], logprobs


PROMPTS = [[3, 4, 5], [7, 8], [11, 2, 9], [1]]
NEXT = by_hand(PROMPTS[2])[0][1]


def compared(requests):
    """Runs requests with and without drafts, compares what comes of them, and returns the loop with drafts."""
    plain, speculative = Loop(requests(), None), Loop(requests(), DRAFTS)
    stats = speculative.scheduler.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    assert speculative.tokens == plain.tokens and speculative.logprobs == plain.logprobs, "to the last bit"
    return speculative


def check(loop, index, num_top, **hand):
    tokens, logprobs = by_hand(PROMPTS[index], **hand)
    assert loop.tokens[index] == tokens
    np.testing.assert_allclose([each.logprob for each in loop.logprobs[index]], logprobs, atol=1e-5)
    assert {len(each.top) for each in loop.logprobs[index]} == {num_top}


def test_drafted_tokens_have_log_probabilities():
    def requests():
        sampled = asked(PROMPTS[1], temperature=0.5, seed=5, logprobs=1)
        return [asked(PROMPTS[0]), sampled, asked(PROMPTS[2], logprobs=3), asked(PROMPTS[3], logprobs=0)]

    loop = compared(requests)
    check(loop, 2, 3)
    check(loop, 3, 0)
    assert loop.tokens[0] == by_hand(PROMPTS[0])[0] and not loop.logprobs[0]


def test_masks_and_penalties_share_the_steps_of_others():
    def requests():
        masked = asked(PROMPTS[2], Banned(NEXT), logprobs=2)
        penalty = asked(PROMPTS[3], repetition_penalty=1.4, logprobs=1)
        return [asked(PROMPTS[0], logprobs=0), asked(PROMPTS[1], temperature=0.5, seed=5), masked, penalty]

    loop = compared(requests)
    check(loop, 0, 0)
    check(loop, 2, 2, banned=NEXT)
    check(loop, 3, 1, penalty=1.4)
    assert loop.asked[2].masks.seen[:NUM_NEW] == [loop.tokens[2][:length] for length in range(NUM_NEW)]
