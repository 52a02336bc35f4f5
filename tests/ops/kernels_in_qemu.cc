// Runs the kernels' handlers for another process: calls come in on standard input, results go out on standard output.
// What XLA's runtime is to a handler (buffers, attributes, a thread pool) is made here, so that the program runs where
// there is no XLA: under an emulator of another processor. `kernels_in_qemu.py` writes the calls.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

#define TARGET(name) extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame*);
#include "targets.inc"
#undef TARGET

struct XLA_FFI_Error { std::string message; };
struct XLA_FFI_ExecutionContext { std::vector<std::thread> threads; };

namespace {

struct Target { const char* name; XLA_FFI_Handler* handler; };
#define TARGET(name) {#name, name},
const Target kTargets[] = {
#include "targets.inc"
};
#undef TARGET

constexpr int64_t kNumThreads = 3, kAlignment = 64;  // XLA aligns buffers to a line of the cache

void read_bytes(void* to, size_t count) {
  if (count && std::fread(to, 1, count, stdin) != count) std::exit(0);  // the other process is done
}

int64_t read_int() {
  int64_t value;
  read_bytes(&value, sizeof value);
  return value;
}

std::string read_string() {
  std::string text(read_int(), '\0');
  read_bytes(text.data(), text.size());
  return text;
}

struct Bytes {
  explicit Bytes(int64_t count) : data(std::aligned_alloc(kAlignment, (count / kAlignment + 1) * kAlignment)), count(count) {}
  ~Bytes() { std::free(data); }
  void* data;
  int64_t count;
};

// A buffer or an array of numbers: its dtype, dimensions and bytes.
struct Numbers {
  Numbers() : dtype(XLA_FFI_DataType(read_int())), dims(read_int()) {
    read_bytes(dims.data(), dims.size() * sizeof(int64_t));
    bytes = std::make_shared<Bytes>(read_int());
  }
  XLA_FFI_Buffer buffer() { return {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, bytes->data, int64_t(dims.size()), dims.data()}; }
  XLA_FFI_DataType dtype;
  std::vector<int64_t> dims;
  std::shared_ptr<Bytes> bytes;
};

std::vector<void*> pointers(auto& items) {
  std::vector<void*> to;
  for (auto& item : items) to.push_back(&item);
  return to;
}

XLA_FFI_Api make_api() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; };
  api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) { args->message = args->error->message.c_str(); };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
  api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
    *args->num_threads = kNumThreads;
    return nullptr;
  };
  api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
    args->ctx->threads.emplace_back(args->task, args->data);
    return nullptr;
  };
  return api;
}

// One call: the target's name, operands, results, attributes in the order of their names.
void answer() {
  const std::string name = read_string();
  std::vector<Numbers> operands;
  for (int64_t count = read_int(); count > 0; count--) {
    operands.emplace_back();
    read_bytes(operands.back().bytes->data, operands.back().bytes->count);
  }
  std::vector<Numbers> results;
  for (int64_t count = read_int(); count > 0; count--) {
    results.emplace_back();
    const int64_t alias = read_int();  // the operand whose memory it has, or -1
    if (alias >= 0) results.back().bytes = operands[alias].bytes;
    else std::memset(results.back().bytes->data, 0xff, results.back().bytes->count);  // NaN until it is written
  }
  const int64_t num_attributes = read_int();
  std::vector<std::string> names;
  std::vector<Numbers> numbers;
  for (int64_t i = 0; i < num_attributes; i++) {
    names.push_back(read_string());
    numbers.emplace_back();
    read_bytes(numbers.back().bytes->data, numbers.back().bytes->count);
  }
  std::vector<XLA_FFI_ByteSpan> spans;
  std::vector<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_Array> arrays;
  std::vector<XLA_FFI_AttrType> kinds;
  for (int64_t i = 0; i < num_attributes; i++) {
    const Numbers& each = numbers[i];
    spans.push_back({names[i].data(), names[i].size()});
    scalars.push_back({each.dtype, each.bytes->data});
    arrays.push_back({each.dtype, each.dims.empty() ? 1 : size_t(each.dims[0]), each.bytes->data});
    kinds.push_back(each.dims.empty() ? XLA_FFI_AttrType_SCALAR : XLA_FFI_AttrType_ARRAY);
  }
  std::vector<void*> attributes;
  for (int64_t i = 0; i < num_attributes; i++) attributes.push_back(numbers[i].dims.empty() ? (void*)&scalars[i] : &arrays[i]);
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  for (auto& span : spans) name_pointers.push_back(&span);

  std::vector<XLA_FFI_Buffer> from, to;
  for (auto& each : operands) from.push_back(each.buffer());
  for (auto& each : results) to.push_back(each.buffer());
  std::vector<void*> from_pointers = pointers(from), to_pointers = pointers(to);
  std::vector<XLA_FFI_ArgType> from_types(from.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> to_types(to.size(), XLA_FFI_RetType_BUFFER);

  static const XLA_FFI_Api api = make_api();
  XLA_FFI_ExecutionContext context;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = &context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, int64_t(from.size()), from_types.data(), from_pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, int64_t(to.size()), to_types.data(), to_pointers.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, num_attributes, kinds.data(), name_pointers.data(), attributes.data()};
  std::string message = "no kernel " + name;
  for (const Target& target : kTargets) {
    if (name != target.name) continue;
    XLA_FFI_Error* error = target.handler(&frame);
    message = error ? error->message : "";
    delete error;
  }
  for (auto& thread : context.threads) thread.join();
  const int64_t length = message.size();
  std::fwrite(&length, sizeof length, 1, stdout);
  std::fwrite(message.data(), 1, length, stdout);
  if (length == 0)
    for (auto& each : results) std::fwrite(each.bytes->data, 1, each.bytes->count, stdout);
  std::fflush(stdout);
}

}  // namespace

int main() {
  for (;;) answer();
}
