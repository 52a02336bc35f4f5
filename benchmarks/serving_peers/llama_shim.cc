// What the benchmark calls of llama.cpp, with plain types: the structs of llama.h differ from release to release, so
// this file is compiled against the header of the release that it is linked with (`environments.py`).

#include <cstdint>
#include <cstdio>

#include "llama.h"

namespace {

void log_errors(ggml_log_level level, const char *text, void *) {
  if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

}  // namespace

struct Engine {
  llama_model *model;
  llama_context *context;
  int32_t vocab_size;
};

extern "C" {

const char *engine_system_info() { return llama_print_system_info(); }

// Returns null where the file cannot be read or memory is short. `context_len`: tokens of all sequences together.
Engine *engine_open(const char *path, int32_t num_threads, uint32_t context_len, uint32_t num_seqs,
                    uint32_t batch_len) {
  llama_log_set(log_errors, nullptr);
  llama_backend_init();
  llama_model *model = llama_model_load_from_file(path, llama_model_default_params());
  if (model == nullptr) return nullptr;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = context_len;
  params.n_batch = batch_len;
  params.n_seq_max = num_seqs;
  params.n_threads = num_threads;
  params.n_threads_batch = num_threads;
  llama_context *context = llama_init_from_model(model, params);
  if (context == nullptr) return nullptr;
  return new Engine{model, context, llama_vocab_n_tokens(llama_model_get_vocab(model))};
}

// Bytes of keys and values follow from this: llama.cpp may round what was asked for.
uint32_t engine_context_len(const Engine *engine) { return llama_n_ctx(engine->context); }

void engine_forget(Engine *engine, int32_t seq) {
  llama_memory_seq_rm(llama_get_memory(engine->context), seq, -1, -1);
}

// Computes `num_tokens` tokens of any sequences; where `is_read`, the most likely next token comes into `next`.
// Returns 0, or llama_decode's code.
int32_t engine_step(Engine *engine, int32_t num_tokens, const int32_t *tokens, const int32_t *positions,
                    const int32_t *seqs, const int8_t *is_read, int32_t *next) {
  llama_batch batch = llama_batch_init(num_tokens, 0, 1);
  batch.n_tokens = num_tokens;
  for (int32_t i = 0; i < num_tokens; ++i) {
    batch.token[i] = tokens[i];
    batch.pos[i] = positions[i];
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = seqs[i];
    batch.logits[i] = is_read[i];
  }
  const int32_t code = llama_decode(engine->context, batch);
  for (int32_t i = 0; code == 0 && i < num_tokens; ++i) {
    if (!is_read[i]) continue;
    const float *logits = llama_get_logits_ith(engine->context, i);
    int32_t best = 0;
    for (int32_t token = 1; token < engine->vocab_size; ++token) {
      if (logits[token] > logits[best]) best = token;
    }
    next[i] = best;
  }
  llama_batch_free(batch);
  return code;
}

// Writes `to` with weights of an llama_ftype. Returns 0 where that worked.
uint32_t engine_quantize(const char *from, const char *to, int32_t ftype, int32_t num_threads) {
  llama_log_set(log_errors, nullptr);
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.nthread = num_threads;
  params.ftype = static_cast<llama_ftype>(ftype);
  return llama_model_quantize(from, to, &params);
}

}  // extern "C"
