// The C interface over Transport: catches exceptions, copies text, counts references.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>

#include "transport/smp_transport.h"
#include "transport/start_guard.h"
#include "transport/transport.h"

struct smp_transport {
  std::atomic<int> references{1};
  smp::Transport transport;

  smp_transport(uint32_t rank, uint32_t size, const smp_options& options)
      : transport(rank, size, options) {}
};

struct smp_start_guard {
  smp::StartGuard guard;
};

// A whole message that somebody waits for. Two hold it: the caller, and the transport until
// release.
struct smp_operation {
  smp_transport* owner;
  uint64_t id;
  std::atomic<int> references{2};
  std::mutex mutex;
  std::condition_variable ended;
  int code = -1;
  bool released = false;
  std::string message;
  void* data = nullptr;
  uint64_t bytes = 0;
};

namespace {

std::mutex current_mutex;
smp_transport* current = nullptr;

// A child that is forked is no rank: it has no transport. When it ends in good order, it ends
// without what libraries do then: Gloo would take the connections of its parent's Horovod out of
// the event set that both have.
void LeaveToParent() {
  current = nullptr;
  current_mutex.unlock();
  // The last that is registered is called first.
  on_exit(
      [](int status, void*) {
        // prints: no other thread is in this child, and `exit` would do the same.
        fflush(nullptr);
        _exit(status);
      },
      nullptr);
}

void CopyText(const std::string& text, char* out, size_t bytes) {
  if (out == nullptr || bytes == 0) return;
  const size_t count = std::min(text.size(), bytes - 1);
  std::memcpy(out, text.data(), count);
  out[count] = '\0';
}

size_t GiveText(const std::string& text, char* out, size_t bytes) {
  CopyText(text, out, bytes);
  return text.size() + 1;
}

void DropOperation(smp_operation* op) {
  if (op->references.fetch_sub(1) == 1) {
    std::free(op->data);
    smp_transport_release(op->owner);
    delete op;
  }
}

int AllocateBytes(void* arg, const smp_message_info* info, smp_buffer* buffer, char* error,
                  size_t error_bytes) {
  auto* op = static_cast<smp_operation*>(arg);
  op->data = std::malloc(std::max<uint64_t>(info->bytes, 1));
  if (op->data == nullptr) {
    CopyText("no memory for a message of " + std::to_string(info->bytes) + " bytes", error,
             error_bytes);
    return SMP_INTERNAL;
  }
  op->bytes = info->bytes;
  buffer->data = op->data;
  buffer->bytes = info->bytes;
  buffer->memory_kind = SMP_MEMORY_HOST;
  return SMP_OK;
}

void OperationDone(void* arg, int code, const char* message) {
  auto* op = static_cast<smp_operation*>(arg);
  std::lock_guard<std::mutex> lock(op->mutex);
  op->message = message;
  op->code = code;
  op->ended.notify_all();
}

void OperationReleased(void* arg) {
  auto* op = static_cast<smp_operation*>(arg);
  {
    std::lock_guard<std::mutex> lock(op->mutex);
    op->released = true;
    op->ended.notify_all();
  }
  DropOperation(op);
}

}  // namespace

int smp_transport_abi(void) { return SMP_TRANSPORT_ABI; }

void smp_options_init(smp_options* options) {
  *options = smp_options{};
  options->struct_bytes = sizeof(smp_options);
  options->single_host = 1;
  options->local_size = 1;
  options->spin_us = -1;
  options->watch_launcher = 1;
  options->watch_signals = 1;
  options->end_process = 1;
  options->read_memory = 1;
  options->huge_pages = 1;
  options->stall_report_s = 30;
  options->stall_timeout_s = 1800;
  options->grace_s = 4;
}

smp_transport* smp_transport_create(uint32_t rank, uint32_t size, const smp_options* options,
                                    char* error, size_t error_bytes) {
  try {
    if (options->struct_bytes != sizeof(smp_options)) {
      CopyText("the caller was built against another version of smp_transport.h", error,
               error_bytes);
      return nullptr;
    }
    if (rank >= size) {
      CopyText("rank " + std::to_string(rank) + " is not below size " + std::to_string(size), error,
               error_bytes);
      return nullptr;
    }
    return new smp_transport(rank, size, *options);
  } catch (const std::exception& e) {
    CopyText(e.what(), error, error_bytes);
    return nullptr;
  }
}

smp_start_guard* smp_start_guard_create(const char* about, char* error, size_t error_bytes) {
  try {
    return new smp_start_guard{smp::StartGuard(about)};
  } catch (const std::exception& e) {
    CopyText(e.what(), error, error_bytes);
    return nullptr;
  }
}

int smp_start_guard_wait(smp_start_guard* g, double seconds) {
  return g->guard.Wait(seconds) ? 1 : 0;
}

void smp_start_guard_say(smp_start_guard* g, const char* words) { g->guard.Say(words); }

void smp_start_guard_close(smp_start_guard* g) { g->guard.Close(); }

void smp_start_guard_free(smp_start_guard* g) { delete g; }

void smp_transport_watch_signals(smp_transport* t) { t->transport.WatchSignals(); }

const void* smp_transport_address(smp_transport* t, size_t* bytes) {
  *bytes = t->transport.address().size();
  return t->transport.address().data();
}

int smp_transport_connect(smp_transport* t, const void* const* addresses,
                          const size_t* address_bytes, size_t count, const void* secret,
                          size_t secret_bytes, char* error, size_t error_bytes) {
  try {
    std::vector<std::string> list;
    for (size_t r = 0; r < count; ++r) {
      list.emplace_back(static_cast<const char*>(addresses[r]), address_bytes[r]);
    }
    t->transport.Connect(list, std::string(static_cast<const char*>(secret), secret_bytes));
    return SMP_OK;
  } catch (const std::invalid_argument& e) {
    CopyText(e.what(), error, error_bytes);
    return SMP_INVALID_ARGUMENT;
  } catch (const std::exception& e) {
    CopyText(e.what(), error, error_bytes);
    return SMP_INTERNAL;
  }
}

int smp_transport_wait_connected(smp_transport* t, double timeout_s, char* error,
                                 size_t error_bytes) {
  std::string message;
  const int code = t->transport.WaitConnected(timeout_s, &message);
  CopyText(message, error, error_bytes);
  return code;
}

uint64_t smp_transport_new_id(smp_transport* t) { return t->transport.NewId(); }
void smp_transport_send(smp_transport* t, const smp_send_params* p) { t->transport.Send(*p); }
void smp_transport_recv(smp_transport* t, const smp_recv_params* p) { t->transport.Receive(*p); }
void smp_transport_cancel(smp_transport* t, uint64_t id) { t->transport.Cancel(id); }
void smp_transport_cancel_all(smp_transport* t, const char* reason) {
  t->transport.CancelAll(reason);
}

void smp_transport_begin_step(smp_transport* t, uint64_t program, int64_t step) {
  t->transport.BeginStep(program, step);
}
void smp_transport_end_step(smp_transport* t, uint64_t program) {
  t->transport.activity().EndStep(program);
}
int smp_transport_await_step(smp_transport* t, uint64_t program, int64_t step, int ended,
                             double timeout_s) {
  t->references.fetch_add(1);
  const bool reached = t->transport.activity().AwaitStep(program, step, ended != 0, timeout_s);
  smp_transport_release(t);
  return reached ? SMP_OK : SMP_DEADLINE_EXCEEDED;
}
void smp_transport_stop_awaiting(smp_transport* t) { t->transport.activity().StopAwaiting(); }
void smp_transport_set_activity(smp_transport* t, const char* activity) {
  t->transport.activity().Set(activity);
}
void smp_transport_begin_collective(smp_transport* t, const char* name) {
  t->transport.activity().BeginCollective(name);
}
void smp_transport_end_collective(smp_transport* t, const char* name) {
  t->transport.activity().EndCollective(name);
}
void smp_transport_set_program_ranks(smp_transport* t, uint64_t program, const uint32_t* ranks,
                                     size_t count) {
  t->transport.SetProgramRanks(program, std::set<uint32_t>(ranks, ranks + count));
}
void smp_transport_set_averaging_ranks(smp_transport* t, uint64_t program, const uint32_t* ranks,
                                       size_t count) {
  t->transport.SetAveragingRanks(program, std::set<uint32_t>(ranks, ranks + count));
}

int smp_transport_goodbye(smp_transport* t, double timeout_s) {
  return t->transport.Goodbye(timeout_s) ? SMP_OK : SMP_DEADLINE_EXCEEDED;
}
int smp_transport_await_goodbyes(smp_transport* t, const uint32_t* ranks, size_t count,
                                 double timeout_s) {
  const std::set<uint32_t> peers(ranks, ranks + count);
  return t->transport.AwaitGoodbyes(peers, timeout_s) ? SMP_OK : SMP_DEADLINE_EXCEEDED;
}
int smp_transport_abort(smp_transport* t, const char* cause_json, int exit_code, double timeout_s) {
  return t->transport.Abort(cause_json, exit_code, timeout_s) ? SMP_OK : SMP_FAILED_PRECONDITION;
}

int smp_transport_ask(smp_transport* t, uint32_t rank, double timeout_s, char* out, size_t bytes) {
  t->references.fetch_add(1);
  std::string answer;
  const bool answered = t->transport.Ask(rank, timeout_s, &answer);
  CopyText(answer, out, bytes);
  smp_transport_release(t);
  return answered ? SMP_OK : SMP_DEADLINE_EXCEEDED;
}

void smp_transport_hold_words(smp_transport* t, double seconds) { t->transport.HoldWords(seconds); }
size_t smp_transport_cause(smp_transport* t, char* out, size_t bytes) {
  return GiveText(t->transport.CauseJson(), out, bytes);
}
size_t smp_transport_stats(smp_transport* t, char* out, size_t bytes) {
  return GiveText(t->transport.Stats(), out, bytes);
}
size_t smp_transport_lanes(smp_transport* t, uint32_t peer, char* out, size_t bytes) {
  return GiveText(t->transport.Lanes(peer), out, bytes);
}

void smp_transport_shutdown(smp_transport* t) {
  {
    std::lock_guard<std::mutex> lock(current_mutex);
    if (current == t) current = nullptr;
  }
  t->transport.activity().StopAwaiting();
  // One that a thread is still inside of is kept for good.
  if (!t->transport.Shutdown()) t->references.fetch_add(1);
}

void smp_transport_destroy(smp_transport* t) {
  smp_transport_shutdown(t);
  smp_transport_release(t);
}

void smp_transport_make_current(smp_transport* t) {
  static const int hooked =
      pthread_atfork([] { current_mutex.lock(); }, [] { current_mutex.unlock(); }, &LeaveToParent);
  static_cast<void>(hooked);
  std::lock_guard<std::mutex> lock(current_mutex);
  current = t;
}

smp_transport* smp_transport_acquire(void) {
  std::lock_guard<std::mutex> lock(current_mutex);
  if (current != nullptr) current->references.fetch_add(1);
  return current;
}

void smp_transport_release(smp_transport* t) {
  if (t->references.fetch_sub(1) == 1) delete t;
}

smp_operation* smp_operation_send(smp_transport* t, uint32_t destination, smp_key key,
                                  const char* label, const void* data, uint64_t bytes) {
  auto* op = new smp_operation;
  op->owner = t;
  t->references.fetch_add(1);
  op->id = t->transport.NewId();
  smp_send_params params{};
  params.id = op->id;
  params.destination = destination;
  params.key = key;
  params.label = label;
  params.buffer.data = const_cast<void*>(data);
  params.buffer.bytes = bytes;
  params.done = &OperationDone;
  params.release = &OperationReleased;
  params.arg = op;
  t->transport.Send(params);
  return op;
}

smp_operation* smp_operation_recv(smp_transport* t, uint32_t source, smp_key key,
                                  const char* label) {
  auto* op = new smp_operation;
  op->owner = t;
  t->references.fetch_add(1);
  op->id = t->transport.NewId();
  smp_recv_params params{};
  params.id = op->id;
  params.source = source;
  params.key = key;
  params.label = label;
  params.allocate = &AllocateBytes;
  params.done = &OperationDone;
  params.release = &OperationReleased;
  params.arg = op;
  t->transport.Receive(params);
  return op;
}

int smp_operation_wait(smp_operation* op, double timeout_s) {
  std::unique_lock<std::mutex> lock(op->mutex);
  op->ended.wait_for(lock, std::chrono::microseconds(static_cast<int64_t>(timeout_s * 1e6)),
                     [op] { return op->code >= 0; });
  return op->code;
}

void smp_operation_cancel(smp_operation* op) { op->owner->transport.Cancel(op->id); }
void smp_operation_withdraw(smp_operation* op) { op->owner->transport.Withdraw(op->id); }
const char* smp_operation_message(smp_operation* op) { return op->message.c_str(); }

void* smp_operation_take(smp_operation* op, uint64_t* bytes) {
  std::lock_guard<std::mutex> lock(op->mutex);
  void* data = op->data;
  *bytes = op->bytes;
  op->data = nullptr;
  return data;
}

void smp_bytes_free(void* data) { std::free(data); }

int smp_operation_released(smp_operation* op) {
  std::lock_guard<std::mutex> lock(op->mutex);
  return op->released ? 1 : 0;
}

void smp_operation_free(smp_operation* op) { DropOperation(op); }
