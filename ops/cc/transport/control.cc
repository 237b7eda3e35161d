// What ranks tell each other besides tensors: the cause of a failure, goodbyes, and what they are
// doing when somebody waits for them.
#include <algorithm>
#include <sstream>
#include <utility>

#include "transport/json.h"
#include "transport/plain_text.h"
#include "transport/transport.h"

namespace smp {
namespace {

// How long a peer has to say what it is doing before a stall is reported without its word.
constexpr auto kAnswerTime = std::chrono::seconds(3);

// A message on its way is given time for its size before it counts as stalled.
constexpr double kSlowestBytesPerSecond = 50e6;

// In a goodbye, in place of a program: what follows is how many steps that average were begun.
constexpr uint64_t kAverages = UINT64_MAX;

constexpr char kAsManyBatches[] =
    ". All ranks need as many batches: smp.shard_dataset gives every replica as many, and "
    "drop_remainder=True, take() or steps_per_epoch leave out what others do not have";

// What a rank that is sent a message of this kind learns from it, and may wait for; null where it
// asks again, or goes on without.
const char* WhatItSays(MessageKind kind) {
  switch (kind) {
    case MessageKind::kProof:
      return "that it is one of the job's ranks";
    case MessageKind::kReady:
      return "that it is ready";
    case MessageKind::kGoodbye:
      return "that it leaves in good order";
    case MessageKind::kTaken:
      return "what became of a tensor that it had offered";
    default:
      return nullptr;
  }
}

bool IsLostConnection(ucs_status_t status) {
  switch (status) {
    case UCS_ERR_CANCELED:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_UNREACHABLE:
      return true;
    default:
      return false;
  }
}

std::string InSeconds(double seconds) {
  std::ostringstream text;
  text << seconds;
  return text.str() + " s";
}

}  // namespace

void Transport::SendControl(uint32_t peer, MessageKind kind, std::string payload,
                            int64_t argument) {
  PeerState& state = peers_[peer];
  if (!worker_ || !worker_->IsConnected(peer) || state.gone) return;
  const bool keyed = kind != MessageKind::kProof;
  MessageHead head{};
  head.kind = kind;
  head.source = rank_;
  head.destination = peer;
  head.sequence = keyed ? state.next_sequence++ : 0;
  head.argument = argument;
  SendWithCode(head, {}, "", std::move(payload), keyed ? &state.send_key : nullptr, 0);
}

// Sends a short message whose code covers its payload as well, which is kept until it is sent.
void Transport::SendWithCode(MessageHead head, const std::vector<int64_t>& dims,
                             const std::string& label, std::string payload, const SipKey* key,
                             uint64_t operation) {
  head.bytes = payload.size();
  const uint64_t id = NewId();
  Control& control = controls_[id];
  control = {std::move(payload), head.destination, head.kind, operation};
  const std::string& kept = control.payload;
  const std::string header = EncodeMessage(head, dims.data(), label, key, kept);
  const ucs_status_t status =
      worker_->Send(head.destination, header, kept.data(), kept.size(), true, id);
  if (status == UCS_INPROGRESS) {
    needs_progress_ = true;
  } else {
    OnComplete(id, status);
  }
}

// UCX did not take a short message to a rank that is there. Where somebody would wait for what it
// says, that wait ends: an offer by its send, the rest by the end of the job.
void Transport::OnUnsent(const Control& control, ucs_status_t status) {
  PeerState& peer = peers_[control.peer];
  if (shut_down_ || peer.gone) return;
  needs_progress_ = true;
  if (IsLostConnection(status)) return OnPeerError(control.peer, ucs_status_string(status));
  if (control.operation != 0) return OnUnsentOffer(control.operation, status);
  const char* what = WhatItSays(control.kind);
  if (what == nullptr || peer.departed) return;
  Fail("lost",
       RankInWords(local_) + " could not tell " + PeerInWords(control.peer) + " " + what +
           ", which it may wait for: " + ucs_status_string(status) + ", says UCX",
       1, SMP_UNAVAILABLE);
}

// Waits until the tasks queued so far have run and UCX has sent what they had to say.
bool Transport::WaitControlSent(double timeout_s) {
  auto queued = std::make_shared<bool>(true);
  const bool is_open = Enqueue([this, queued] {
    *queued = false;
    changed_.notify_all();
  });
  if (!is_open) return false;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto deadline = Clock::now() + std::chrono::microseconds(int64_t(timeout_s * 1e6));
  return changed_.wait_until(lock, deadline, [&] { return !*queued && controls_.empty(); });
}

// --- causes

bool Transport::Fail(const std::string& kind, const std::string& message, int exit_code, int code) {
  const std::string json = "{\"kind\": " + JsonString(kind) +
                           ", \"rank\": " + std::to_string(rank_) +
                           ", \"host\": " + JsonString(local_.hostname) +
                           ", \"step\": " + std::to_string(activity_.step()) +
                           ", \"message\": " + JsonString(message) + "}";
  return SetCause(json, exit_code, code, true);
}

void Transport::FailHere(const std::string& kind, const std::string& what, int exit_code) {
  Fail(kind, RankInWords(local_) + " ends " + activity_.StepInWords() + ": " + what, exit_code,
       SMP_ABORTED);
}

bool Transport::SetCause(const std::string& whole, int exit_code, int code, bool tell_others) {
  // As all ranks hear it.
  const std::string json = JsonWithin(whole, kMaxControlBytes);
  std::string message = JsonField(json, "message");
  if (message.empty()) message = json;
  // Another rank may have said it.
  message = PlainText(message);
  {
    std::lock_guard<std::mutex> lock(cause_mutex_);
    if (failed_) return false;
    cause_ = json;
    cause_message_ = message;
    cause_code_ = code;
    failed_ = true;
  }
  guardian_->Failed("[rank " + std::to_string(rank_) + "] " + message, exit_code);
  Enqueue([this, json, message, exit_code, code, tell_others] {
    if (tell_others) {
      for (uint32_t r = 0; r < size_; ++r) {
        if (r != rank_ && peers_[r].ready) SendControl(r, MessageKind::kAbort, json, exit_code);
      }
    }
    EndAll(code, message);
    changed_.notify_all();
    if (controls_.empty()) guardian_->Told();
  });
  return true;
}

bool Transport::Abort(const std::string& cause_json, int exit_code, double timeout_s) {
  if (!SetCause(cause_json, exit_code, SMP_ABORTED, true)) return false;
  return WaitControlSent(timeout_s);
}

std::string Transport::CauseJson() {
  std::lock_guard<std::mutex> lock(cause_mutex_);
  return cause_;
}

void Transport::OnAbort(const std::string& json, int exit_code) {
  SetCause(json, exit_code, SMP_ABORTED, false);
}

// --- goodbyes

void Transport::SetProgramRanks(uint64_t program, std::set<uint32_t> ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  program_ranks_[program] = std::move(ranks);
}

void Transport::SetAveragingRanks(uint64_t program, std::set<uint32_t> ranks) {
  activity_.SetAverages(program);
  std::lock_guard<std::mutex> lock(mutex_);
  averaging_ranks_[program] = std::move(ranks);
}

// A goodbye that comes while this rank is between two steps disturbs nothing until the next one.
void Transport::BeginStep(uint64_t program, int64_t step) {
  activity_.BeginStep(program, step);
  if (!any_departed_) return;
  Enqueue([this] {
    for (uint32_t r = 0; r < size_; ++r) {
      if (peers_[r].departed) CheckStepAfterGoodbye(r);
    }
  });
}

bool Transport::Goodbye(double timeout_s) {
  // Who leaves because of a signal does not leave in good order.
  int exit_code = 0;
  const std::string signal = guardian_->PendingSignal(&exit_code);
  if (!signal.empty()) FailHere("signal", signal, exit_code);
  Enqueue([this] {
    if (left_ || failed_) return;
    left_ = true;
    std::string steps =
        std::to_string(kAverages) + " " + std::to_string(activity_.averages()) + "\n";
    for (const auto& [program, state] : activity_.Programs()) {
      steps += std::to_string(program) + " " + std::to_string(state.begun) + "\n";
      if (steps.size() > kMaxControlBytes - 64) break;
    }
    for (uint32_t r = 0; r < size_; ++r) {
      if (r != rank_ && peers_[r].ready) SendControl(r, MessageKind::kGoodbye, steps, 0);
    }
    RefuseArrived();
  });
  return WaitControlSent(timeout_s);
}

bool Transport::AwaitGoodbyes(const std::set<uint32_t>& peers, double timeout_s) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(timeout_s));
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] {
    return failed_ || shut_down_ || std::all_of(peers.begin(), peers.end(), [&](uint32_t r) {
             return r >= size_ || r == rank_ || peers_[r].departed || peers_[r].gone;
           });
  });
}

void Transport::OnGoodbye(uint32_t source, const std::string& payload) {
  PeerState& peer = peers_[source];
  peer.departed = any_departed_ = true;
  changed_.notify_all();
  std::istringstream text(payload);
  uint64_t program;
  int64_t step;
  while (text >> program >> step) {
    (program == kAverages ? peer.averages_at_goodbye : peer.steps_at_goodbye[program]) = step;
  }
  for (const auto& [id, op] : operations_) {
    if (op->peer != source || op->ended || op->in_use) continue;
    FailFor(*op);
    return;
  }
  CheckStepAfterGoodbye(source);
}

void Transport::CheckStepAfterGoodbye(uint32_t peer) {
  std::string message;
  if (!LeftEarly(peer, &message)) return;
  Fail("left_early",
       message + "; " + RankInWords(local_) + " is " + activity_.StepInWords() + kAsManyBatches, 1,
       SMP_ABORTED);
}

std::string Transport::FailFor(const Operation& op) {
  std::string message;
  LeftEarly(op.peer, &message);
  message += op.is_send ? "; it does not take the " : "; this rank waits for the ";
  message += Describe(op);
  if (op.key.program < SMP_RESERVED_PROGRAMS) message += kAsManyBatches;
  Fail("left_early", message, 1, SMP_ABORTED);
  return message;
}

// The words for a rank that is no longer there; true if this rank is inside a step that the other
// one takes part in and never began.
bool Transport::LeftEarly(uint32_t peer, std::string* message) const {
  int64_t last = -1;
  for (const auto& [program, step] : peers_[peer].steps_at_goodbye) last = std::max(last, step);
  *message = PeerInWords(peer) + " left the loop early " +
             (last < 0 ? "before its first step" : "after step " + std::to_string(last));
  for (const auto& [program, state] : activity_.Programs()) {
    if (!state.inside) continue;
    const auto averaging = averaging_ranks_.find(program);
    if (averaging != averaging_ranks_.end() && averaging->second.count(peer) > 0) {
      if (peers_[peer].averages_at_goodbye < activity_.averages()) return true;
      continue;
    }
    const auto ranks = program_ranks_.find(program);
    if (ranks != program_ranks_.end() && ranks->second.count(peer) == 0) continue;
    const auto theirs = peers_[peer].steps_at_goodbye.find(program);
    if (theirs == peers_[peer].steps_at_goodbye.end() || theirs->second < state.begun) return true;
  }
  return false;
}

// --- stalls

std::string Transport::StatusInWords() const {
  std::string words = activity_.InWords();
  const Operation* oldest = nullptr;
  for (const auto& [id, op] : operations_) {
    if (!op->ended && (oldest == nullptr || op->posted < oldest->posted)) oldest = op.get();
  }
  if (oldest != nullptr) {
    const std::chrono::duration<double> age = Clock::now() - oldest->posted;
    words += ", and waits " + InSeconds(age.count()) + " for the " + Describe(*oldest);
  }
  return words;
}

void Transport::OnStallAnswer(uint32_t peer, const std::string& text) {
  if (peers_[peer].stall_asked && !peers_[peer].stall_reported) {
    ReportStall(peer, "is alive and " + text);
  }
}

void Transport::CheckStalls() {
  const auto now = Clock::now();
  const Operation* oldest = nullptr;
  std::map<uint32_t, const Operation*> by_peer;
  for (const auto& [id, op] : operations_) {
    if (op->ended) continue;
    const Operation*& of_peer = by_peer[op->peer];
    if (of_peer == nullptr || op->posted < of_peer->posted) of_peer = op.get();
    if (oldest == nullptr || op->posted < oldest->posted) oldest = op.get();
  }
  for (const auto& [r, op] : by_peer) {
    const std::chrono::duration<double> age = now - op->posted;
    PeerState& peer = peers_[r];
    const double transfer_s = static_cast<double>(op->buffer.bytes) / kSlowestBytesPerSecond;
    if (age.count() < options_.stall_report_s + transfer_s || peer.stall_reported) continue;
    if (!peer.stall_asked) {
      peer.stall_asked = true;
      peer.stall_asked_at = now;
      peer.stall_line = RankInWords(local_) + " has waited " + InSeconds(age.count()) +
                        " for the " + Describe(*op);
      SendControl(r, MessageKind::kAskStatus, "", 0);
    } else if (now - peer.stall_asked_at > kAnswerTime) {
      ReportStall(
          r, "does not answer: its process is stopped, out of reach, or has no processor time");
    }
  }
  if (oldest == nullptr) return;
  const std::chrono::duration<double> age = now - oldest->posted;
  if (age.count() < options_.stall_timeout_s) return;
  Fail("stalled",
       RankInWords(local_) + " gave up " + activity_.StepInWords() + " after stall_timeout = " +
           InSeconds(options_.stall_timeout_s) + ": it waited for the " + Describe(*oldest),
       1, SMP_DEADLINE_EXCEEDED);
}

void Transport::ReportStall(uint32_t peer, const std::string& what_it_does) {
  peers_[peer].stall_reported = true;
  guardian_->Say(peers_[peer].stall_line + ". Rank " + std::to_string(peer) + " " + what_it_does +
                 ". The job goes on; it ends after stall_timeout = " +
                 InSeconds(options_.stall_timeout_s) + ".");
}

}  // namespace smp
