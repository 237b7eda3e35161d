// Storms: threads send, receive and cancel between two ranks while a rank cancels all, fails, or is
// shut down under them. Every call ends once, is released once behind that, and is freed then; what
// else goes wrong a sanitizer sees.
//
//   storm_test [ROUNDS]
#include <algorithm>
#include <cstdlib>
#include <random>
#include <thread>

#include "pair.h"

namespace smp {
namespace {

constexpr int kThreads = 6;  // half of them of each rank

enum class End { kCancelAll, kAbort, kShutdown };

// Of every kind: none, eager, offered or fetched, and seldom what two threads copy.
size_t SomeBytes(uint32_t random) {
  constexpr size_t kSizes[] = {0, 100, 9000, 60000};
  return random % 128 == 0 ? 3 << 20 : kSizes[random % 4];
}

// Threads of both ranks that make as many calls as they are told, and cancel some of them.
class Storm {
 public:
  Storm(const Pair& pair, uint32_t seed) : seed_(seed) {
    for (int rank = 0; rank < 2; ++rank) held_[rank] = pair.Hold(rank);
    for (int i = 0; i < kThreads; ++i) {
      threads_.emplace_back([this, i] { Run(i); });
    }
  }

  // Every thread makes so many calls more.
  void Blow(int calls) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int& left : left_) left += calls;
    changed_.notify_all();
  }

  // Until every thread has only so many of its calls before it.
  void AwaitLeft(int calls) {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, kDeadline, [&] {
      return std::all_of(left_, left_ + kThreads, [&](int left) { return left <= calls; });
    }));
  }

  // All threads and all calls come to an end. What waits for a partner is cancelled.
  void Calm(Pair* pair) {
    AwaitLeft(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
      changed_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    pair->Destroy();
    pending_.AwaitNone();
    for (smp_transport* rank : held_) smp_transport_release(rank);
  }

 private:
  // The threads 2 * i and 2 * i + 1 send each other what the other one receives.
  void Run(int thread) {
    std::mt19937 random(seed_ * kThreads + static_cast<uint32_t>(thread));
    const int rank = thread % 2;
    smp_transport* transport = held_[rank];
    const auto peer = static_cast<uint32_t>(1 - rank);
    std::vector<uint64_t> recent(16, 0);
    for (int64_t i = 0; Next(thread); ++i) {
      const int64_t step = i * kThreads + thread - rank;
      uint64_t id = 0;
      if (random() % 2 == 0) {
        auto* call = new PairCall(&pending_, SomeBytes(random()));
        id = Send(transport, peer, step + rank, call);
      } else {
        id = Receive(transport, peer, step + 1 - rank, new PairCall(&pending_, 0));
      }
      uint64_t& place = recent[random() % recent.size()];
      if (place != 0 && random() % 2 == 0) smp_transport_cancel(transport, place);
      place = id;
      if (random() % 64 == 0) smp_transport_cancel_all(transport, "the step was cancelled");
    }
  }

  // Waits for a call to make; false when there will be none.
  bool Next(int thread) {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, kDeadline, [&] { return left_[thread] > 0 || is_over_; }));
    if (left_[thread] == 0) return false;
    --left_[thread];
    changed_.notify_all();
    return true;
  }

  const uint32_t seed_;
  smp_transport* held_[2];
  Pending pending_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  int left_[kThreads] = {};  // calls, by thread
  std::vector<std::thread> threads_;
};

void Round(End end, uint32_t seed) {
  Pair pair;
  Storm storm(pair, seed);
  storm.Blow(200);
  storm.AwaitLeft(100);
  switch (end) {
    case End::kCancelAll:
      for (int i = 0; i < 20; ++i) {
        smp_transport_cancel_all(pair.ranks[i % 2], "all was cancelled");
      }
      break;
    case End::kAbort:
      smp_transport_abort(pair.ranks[seed % 2], R"({"message": "the storm is too strong"})", 1, 10);
      break;
    case End::kShutdown:
      pair.Destroy();
  }
  // Also what comes afterwards ends.
  storm.Calm(&pair);
}

}  // namespace
}  // namespace smp

int main(int argc, char** argv) {
  alarm(1200);
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 3;
  for (int i = 0; i < rounds; ++i) {
    for (smp::End end : {smp::End::kCancelAll, smp::End::kAbort, smp::End::kShutdown}) {
      smp::Round(end, static_cast<uint32_t>(i));
    }
  }
  std::puts("storm_test: ok");
  return 0;
}
