// What becomes of a short message that UCX does not take, though the rank it is for is there:
// whoever would wait for it is told. UCX's function for sending is this file's own, which refuses
// one kind.
#include <dlfcn.h>
#include <ucp/api/ucp.h>

#include <atomic>

#include "pair.h"
#include "transport/message.h"

namespace {

using Sending = decltype(&ucp_am_send_nbx);

std::atomic<int> refused_kind{0};

bool IsRefused(const void* header, size_t bytes) {
  smp::MessageHead head;
  if (bytes < sizeof(head)) return false;
  std::memcpy(&head, header, sizeof(head));
  return static_cast<int>(head.kind) == refused_kind;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ucs_status_ptr_t
ucp_am_send_nbx(ucp_ep_h ep, unsigned id, const void* header, size_t header_bytes, const void* data,
                size_t count, const ucp_request_param_t* param) {
  static const auto of_ucx = reinterpret_cast<Sending>(dlsym(RTLD_NEXT, "ucp_am_send_nbx"));
  if (IsRefused(header, header_bytes)) return UCS_STATUS_PTR(UCS_ERR_NO_MEMORY);
  return of_ucx(ep, id, header, header_bytes, data, count, param);
}

namespace smp {
namespace {

constexpr size_t kLarge = 1 << 20;

bool Contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "not in it: %s\n%s\n", part.c_str(), text.c_str());
  return false;
}

std::string CauseOf(smp_transport* transport) {
  std::string text(smp_transport_cause(transport, nullptr, 0), '\0');
  smp_transport_cause(transport, &text[0], text.size());
  return text;
}

// A call whose end is waited for.
struct Ended {
  Event done;
  int code = -1;
  std::string message;
  PairCall* Make(Pending* pending, size_t bytes) {
    auto* call = new PairCall(pending, bytes);
    call->on_done = [this](int status, const std::string& words) {
      code = status;
      message = words;
      done.Set();
    };
    return call;
  }
};

// The send ends, and nothing else.
void TestOffer() {
  Pair pair;
  Pending pending;
  Ended sent;
  refused_kind = static_cast<int>(MessageKind::kOffer);
  Send(pair.ranks[1], 0, 1, sent.Make(&pending, kLarge));
  refused_kind = 0;
  sent.done.Wait();
  CHECK(sent.code == SMP_INTERNAL);
  CHECK(Contains(sent.message, "send of 'a tensor' (step 1, "));
  CHECK(Contains(sent.message, "failed: Out of memory"));
  pending.AwaitNone();
  CHECK(CauseOf(pair.ranks[0]).size() == 1 && CauseOf(pair.ranks[1]).size() == 1);
  pair.Destroy();
}

// The sender waits for this word: the job ends, and says why on both ranks.
void TestTaken() {
  Pair pair;
  Pending pending;
  Ended sent, received;
  refused_kind = static_cast<int>(MessageKind::kTaken);
  Send(pair.ranks[1], 0, 1, sent.Make(&pending, kLarge));
  Receive(pair.ranks[0], 1, 1, received.Make(&pending, 0));
  sent.done.Wait();
  received.done.Wait();
  refused_kind = 0;
  CHECK(received.code == SMP_OK);
  CHECK(sent.code == SMP_ABORTED);
  CHECK(Contains(sent.message, "send of 'a tensor' (step 1, "));
  CHECK(Contains(sent.message, "rank 0 (host "));
  CHECK(Contains(sent.message, ") could not tell rank 1 (host "));
  CHECK(Contains(sent.message,
                 ") what became of a tensor that it had offered, which it may wait for: Out of "
                 "memory, says UCX"));
  CHECK(CauseOf(pair.ranks[0]) == CauseOf(pair.ranks[1]));
  pair.Destroy();
  pending.AwaitNone();
}

void TestGoodbye() {
  Pair pair;
  refused_kind = static_cast<int>(MessageKind::kGoodbye);
  CHECK(smp_transport_goodbye(pair.ranks[0], 60) == SMP_OK);
  refused_kind = 0;
  CHECK(Contains(CauseOf(pair.ranks[0]), "that it leaves in good order"));
  pair.Destroy();
}

// Nobody waits for ever for what a rank is doing, and the job goes on without it.
void TestStatus() {
  Pair pair;
  char answer[8192];
  refused_kind = static_cast<int>(MessageKind::kStatus);
  CHECK(smp_transport_ask(pair.ranks[0], 1, 0.05, answer, sizeof(answer)) == SMP_DEADLINE_EXCEEDED);
  refused_kind = 0;
  CHECK(smp_transport_ask(pair.ranks[0], 1, 60, answer, sizeof(answer)) == SMP_OK);
  CHECK(CauseOf(pair.ranks[0]).size() == 1 && CauseOf(pair.ranks[1]).size() == 1);
  pair.Destroy();
}

}  // namespace
}  // namespace smp

int main() {
  alarm(240);
  smp::TestOffer();
  smp::TestTaken();
  smp::TestGoodbye();
  smp::TestStatus();
  std::puts("refusals_test: ok");
  return 0;
}
