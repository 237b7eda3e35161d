// How operations end: first done, then release, whichever threads call them; with an error once the
// transport is shut down; with the cause of a failure, as all ranks hear it. And a shutdown that
// does not wait for ever.
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

std::string CauseOf(smp_transport* transport) {
  std::string text(smp_transport_cause(transport, nullptr, 0), '\0');
  smp_transport_cause(transport, &text[0], text.size());
  return text.c_str();
}

// Once a rank's job has failed, both ranks say the same of it.
void CheckCauses(Pair* pair, const std::string& begin, const std::string& end) {
  const uint32_t other = 0;
  CHECK(smp_transport_await_goodbyes(pair->ranks[1], &other, 1, 60) == SMP_OK);
  const std::string cause = CauseOf(pair->ranks[1]);
  CHECK(cause == CauseOf(pair->ranks[0]));
  CHECK(cause.size() <= 4096 && cause.find(begin) != std::string::npos);
  CHECK(cause.substr(cause.size() - end.size()) == end);
  pair->Destroy();
}

// Of long words, the other ranks hear the begin: what is too long for a message was refused there.
void TestLongWords() {
  const std::string words(5000, 'w');
  Pair aborted;
  const std::string json = R"({"message": ")" + words + R"(", "kind": "exception"})";
  CHECK(smp_transport_abort(aborted.ranks[0], json.c_str(), 1, 60) == SMP_OK);
  CheckCauses(&aborted, R"({"message": "www)", R"(www ...", "kind": "exception"})");

  smp_options options = Pair::Options();
  options.stall_timeout_s = 0.1;
  Pair stalled(options);
  smp_operation* operation =
      smp_operation_recv(stalled.ranks[0], 1, KeyOfStep(0), ("a layer/" + words).c_str());
  CheckCauses(&stalled, "receive of 'a layer/www", R"("})");
  CHECK(smp_operation_wait(operation, 60) == SMP_DEADLINE_EXCEEDED);
  smp_operation_free(operation);
}

}  // namespace
}  // namespace smp

int main() {
  alarm(240);
  smp::TestStuckThread();
  smp::TestDoneBeforeRelease();
  smp::TestAfterShutdown();
  smp::TestLongWords();
  std::puts("endings_test: ok");
  return 0;
}
