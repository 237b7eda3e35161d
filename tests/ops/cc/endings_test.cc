// How operations end: first done, then release, whichever threads call them; with an error once the
// transport is shut down; and a shutdown that does not wait for ever.
#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "pair.h"

namespace smp {
namespace {

constexpr size_t kLarge = 16 << 20;

// A large receive is being copied by the thread that posted it when all operations are cancelled.
// The progress thread is held in the done of another one, until the first thread is through: then
// the buffer is free, and its release still has to wait for the done. True if it came like that.
bool CancelDuringCopy(const Pair& pair, int64_t round) {
  constexpr int kOthers = 64;
  Pending pending;
  const int64_t first = round * 1000;
  auto* sent = new PairCall(&pending, kLarge);
  Send(pair.ranks[1], 0, first, sent);
  // The offer has come behind this one's message.
  Event small_came;
  auto* small = new PairCall(&pending, 0);
  small->on_done = [&](int code, const std::string&) {
    CHECK(code == SMP_OK);
    small_came.Set();
  };
  Receive(pair.ranks[0], 1, first + 1, small);
  Send(pair.ranks[1], 0, first + 1, new PairCall(&pending, 8));
  small_came.Wait();

  Event is_placed, is_cancelled, through;
  std::atomic<bool> was_cancelled{false}, large_came{false}, other_came_first{false};
  auto* large = new PairCall(&pending, 0);
  // Under the lock, which the copy goes without: the progress thread takes it then, to cancel.
  large->on_allocate = [&] {
    is_placed.Set();
    is_cancelled.Wait();
  };
  large->on_done = [&](int code, const std::string&) {
    large_came = true;
    was_cancelled = code == SMP_CANCELLED;
  };
  std::thread poster([&] {
    Receive(pair.ranks[0], 1, first, large);
    through.Set();
  });
  is_placed.Wait();
  for (int i = 0; i < kOthers; ++i) {
    auto* other = new PairCall(&pending, 0);
    other->on_done = [&](int code, const std::string&) {
      CHECK(code == SMP_CANCELLED);
      through.Wait();
      if (!large_came) other_came_first = true;
    };
    Receive(pair.ranks[0], 1, first + 2 + i, other);
  }
  smp_transport_cancel_all(pair.ranks[0], "the step was cancelled");
  is_cancelled.Set();
  poster.join();
  pending.AwaitNone();
  return was_cancelled && other_came_first;
}

void TestDoneBeforeRelease() {
  Pair pair;
  int64_t round = 0;
  while (!CancelDuringCopy(pair, ++round)) CHECK(round < 100);
  std::printf("seen in round %d\n", static_cast<int>(round));
  pair.Destroy();
}

// What is submitted when nobody is left to take it.
void TestAfterShutdown() {
  Pair pair;
  smp_transport* held = pair.Hold(0);
  pair.Destroy();
  Pending pending;
  for (int i = 0; i < 2; ++i) {
    auto* call = new PairCall(&pending, 8);
    std::string why;
    call->on_done = [&](int code, const std::string& message) {
      CHECK(code == SMP_FAILED_PRECONDITION);
      why = message;
    };
    if (i == 0) {
      Send(held, 1, 5, call);
    } else {
      Receive(held, 1, 5, call);
    }
    CHECK(why.find("comes after this rank has left the job") != std::string::npos);
    CHECK(why.find("rank 1 (host ") != std::string::npos);
    CHECK(why.find("'a tensor' (step 5,") != std::string::npos);
  }
  pending.AwaitNone();
  smp_transport_cancel(held, 1);
  smp_transport_cancel_all(held, "nothing is there");
  CHECK(smp_transport_goodbye(held, 100) == SMP_DEADLINE_EXCEEDED);
  smp_transport_release(held);
}

// A done that does not come back holds the progress thread: what shuts down says so and goes on. In
// a process of its own, since the transport is left open.
void TestStuckThread() {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid > 0) {
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return;
  }
  smp_options options = Pair::Options();
  options.stall_timeout_s = 0.3;
  Pair pair(options);
  smp_transport* held = pair.Hold(0);
  Pending pending;
  Event is_stuck, goes_on, through;
  auto* call = new PairCall(&pending, 0);
  call->on_done = [&](int, const std::string&) {
    is_stuck.Set();
    goes_on.Wait();
    through.Set();
  };
  const uint64_t id = Receive(held, 1, 0, call);
  smp_transport_cancel(held, id);
  is_stuck.Wait();
  pair.Destroy();
  goes_on.Set();
  through.Wait();
  pending.AwaitNone();
  _exit(0);
}

}  // namespace
}  // namespace smp

int main() {
  alarm(240);
  smp::TestStuckThread();
  smp::TestDoneBeforeRelease();
  smp::TestAfterShutdown();
  std::puts("endings_test: ok");
  return 0;
}
