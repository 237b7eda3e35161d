// Two ranks of one job in one process, and calls that own themselves, as the TensorFlow kernels
// make them: `release` frees them, so that whatever touches one afterwards is a fault.
#ifndef SMP_TF_TESTS_OPS_CC_PAIR_H_
#define SMP_TF_TESTS_OPS_CC_PAIR_H_

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "transport/smp_transport.h"

namespace smp {

// Far beyond what anything here takes, also under a sanitizer on a busy machine.
constexpr auto kDeadline = std::chrono::seconds(120);

// Something that happens once, and that threads wait for.
class Event {
 public:
  void Set() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_set_ = true;
    changed_.notify_all();
  }
  bool IsSet() {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_set_;
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, kDeadline, [this] { return is_set_; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

// Calls that were submitted and not released yet.
class Pending {
 public:
  void Add() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++count_;
  }
  void Remove() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--count_ == 0) changed_.notify_all();
  }
  void AwaitNone() {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, kDeadline, [this] { return count_ == 0; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

// One send or receive.
struct PairCall {
  explicit PairCall(Pending* pending, size_t bytes) : pending(pending), data(bytes, 'x') {
    pending->Add();
  }
  ~PairCall() { pending->Remove(); }

  Pending* const pending;
  std::vector<char> data;
  std::function<void()> on_allocate;
  std::function<void(int code, const std::string& message)> on_done;
  bool is_done = false;  // of one thread, if done comes before release

  static int Allocate(void* arg, const smp_message_info* info, smp_buffer* buffer, char*, size_t) {
    auto* call = static_cast<PairCall*>(arg);
    call->data.resize(info->bytes);
    buffer->data = call->data.data();
    buffer->bytes = info->bytes;
    buffer->memory_kind = SMP_MEMORY_HOST;
    if (call->on_allocate) call->on_allocate();
    return SMP_OK;
  }
  static void Done(void* arg, int code, const char* message) {
    auto* call = static_cast<PairCall*>(arg);
    CHECK(!call->is_done);
    call->is_done = true;
    if (call->on_done) call->on_done(code, message);
  }
  static void Release(void* arg) {
    auto* call = static_cast<PairCall*>(arg);
    CHECK(call->is_done);
    delete call;
  }
};

inline smp_key KeyOfStep(int64_t step) { return {1, step, 0, 0}; }

// Both return the number by which the call may be cancelled.
inline uint64_t Send(smp_transport* transport, uint32_t to, int64_t step, PairCall* call) {
  const int64_t dims[] = {static_cast<int64_t>(call->data.size())};
  smp_send_params params{};
  const uint64_t id = params.id = smp_transport_new_id(transport);
  params.destination = to;
  params.key = KeyOfStep(step);
  params.ndim = 1;
  params.dims = dims;
  params.label = "a tensor";
  params.buffer = {call->data.data(), call->data.size(), SMP_MEMORY_HOST, nullptr};
  params.done = &PairCall::Done;
  params.release = &PairCall::Release;
  params.arg = call;
  smp_transport_send(transport, &params);
  return id;
}

inline uint64_t Receive(smp_transport* transport, uint32_t from, int64_t step, PairCall* call) {
  smp_recv_params params{};
  const uint64_t id = params.id = smp_transport_new_id(transport);
  params.source = from;
  params.key = KeyOfStep(step);
  params.label = "a tensor";
  params.allocate = &PairCall::Allocate;
  params.done = &PairCall::Done;
  params.release = &PairCall::Release;
  params.arg = call;
  smp_transport_recv(transport, &params);
  return id;
}

// Rank 0 and rank 1, connected. Whoever takes one out destroys it.
struct Pair {
  smp_transport* ranks[2];

  static smp_options Options() {
    smp_options options;
    smp_options_init(&options);
    options.local_size = 2;
    options.end_process = 0;
    options.watch_signals = 0;
    options.watch_launcher = 0;
    options.huge_pages = 0;
    return options;
  }

  explicit Pair(const smp_options& options = Options()) {
    char error[1024] = "";
    const void* addresses[2];
    size_t bytes[2];
    for (uint32_t r = 0; r < 2; ++r) {
      ranks[r] = smp_transport_create(r, 2, &options, error, sizeof(error));
      if (ranks[r] == nullptr) std::fprintf(stderr, "%s\n", error);
      CHECK(ranks[r] != nullptr);
      addresses[r] = smp_transport_address(ranks[r], &bytes[r]);
    }
    const char secret[] = "0123456789abcdef0123456789abcdef";
    for (smp_transport* rank : ranks) {
      CHECK(smp_transport_connect(rank, addresses, bytes, 2, secret, sizeof(secret) - 1, error,
                                  sizeof(error)) == SMP_OK);
    }
    for (smp_transport* rank : ranks) {
      const int code = smp_transport_wait_connected(rank, 60, error, sizeof(error));
      if (code != SMP_OK) std::fprintf(stderr, "%s\n", error);
      CHECK(code == SMP_OK);
    }
  }

  // A reference of the caller's own to a rank, as the kernels hold one.
  smp_transport* Hold(int rank) const {
    smp_transport_make_current(ranks[rank]);
    return smp_transport_acquire();
  }

  void Destroy() {
    for (smp_transport*& rank : ranks) {
      if (rank != nullptr) smp_transport_destroy(rank);
      rank = nullptr;
    }
  }
};

}  // namespace smp

#endif  // SMP_TF_TESTS_OPS_CC_PAIR_H_
