// Large tensors between ranks of one host, in one copy.
//
//   sender                                   receiver
//     │ ── offer: where the tensor lies ──▶    │  waits for its receive, if that is not there yet
//     │                                        │  reads the tensor into its final place
//     │ ◀── taken ──                           │
//     ▼ the buffer is free                     ▼ done
//
// Through UCX's shared memory it is two copies, in pieces for which both ranks have to wake up,
// since UCX does not read other processes' memory where it has to notice that one of them ended.
// The kernel tells a reader of a process that is gone; of a tensor that is gone the guard does.
// Every offer is answered: by "taken", by a refusal, or, where the tensor is there and cannot be
// read after all, by asking for it through UCX.
#include <cstring>
#include <utility>

#include "transport/plain_text.h"
#include "transport/transport.h"

namespace smp {
namespace {

// The words of an answer that asks for the tensor through UCX; others are refusals.
constexpr char kSendIt[] = "send it";

// What a sender says before it takes a tensor back has come by then, or its end was noticed.
constexpr auto kTimeForTheCause = std::chrono::seconds(1);

}  // namespace

bool Transport::CanRead(const Address& address) const {
  if (options_.read_memory == 0 || address.host_id != local_.host_id) return false;
  std::array<uint8_t, 32> nonce{};
  return ReadPeerMemory(address.pid, address.nonce_at, nonce.data(), nonce.size()) == 0 &&
         nonce == address.nonce;
}

void Transport::SendOffer(Operation* op, MessageHead head) {
  huge_pages_.OnMessage(op->buffer.data, op->buffer.bytes);
  op->guard = offer_salt_ + op->id;
  const Offer offer{reinterpret_cast<uint64_t>(op->buffer.data), op->buffer.bytes,
                    reinterpret_cast<uint64_t>(&op->guard), op->guard, op->id};
  head.kind = MessageKind::kOffer;
  SendWithCode(head, op->dims, op->label, {reinterpret_cast<const char*>(&offer), sizeof(offer)},
               &peers_[op->peer].send_key, op->id);
}

void Transport::Answer(uint32_t sender, const Offer& offer, const std::string& words) {
  SendControl(sender, MessageKind::kTaken, words, static_cast<int64_t>(offer.operation));
}

void Transport::OnOffer(const MessageView& view, const std::string& payload) {
  const uint32_t source = view.head.source;
  Offer offer;
  if (payload.size() != sizeof(offer)) {
    Refuse("it offers a tensor in no form that was agreed upon", source);
    return;
  }
  std::memcpy(&offer, payload.data(), sizeof(offer));
  if (failed_ || left_ || shut_down_) return Answer(source, offer, "it has ended");
  const MatchKey key{source, view.head.key};
  const uint64_t waiting = table_.TakeWaiting(key);
  if (waiting != 0) return Take(operations_.at(waiting).get(), view, offer);
  ArrivedMessage message;
  message.view = view;
  message.offer = offer;
  Keep(key, std::move(message));
}

void Transport::Take(Operation* op, const MessageView& view, const Offer& offer) {
  if (!Place(op, view, offer.bytes)) {
    return Answer(view.head.source, offer, "its receive has ended in an error");
  }
  op->in_use = true;
  copies_.push_back({op->id, peers_[op->peer].address.pid, offer, op->buffer.data});
}

// Makes one copy, without the lock, which other operations may have meanwhile.
bool Transport::RunCopy(std::unique_lock<std::mutex>* lock) {
  if (copies_.empty()) return false;
  const Copy copy = copies_.front();
  copies_.pop_front();
  ++copying_;
  lock->unlock();
  huge_pages_.BeforeWrite(copy.to, copy.offer.bytes);
  const ReadResult result = ReadOffer(copy.pid, copy.offer, copy.to, &second_reader_);
  // Behind the copy, which has filled it.
  huge_pages_.OnMessage(copy.to, copy.offer.bytes);
  lock->lock();
  OnCopied(copy, result);
  if (--copying_ == 0) changed_.notify_all();
  return true;
}

void Transport::OnCopied(const Copy& copy, const ReadResult& result) {
  Operation* op = operations_.at(copy.operation).get();
  const uint32_t source = op->peer;
  PeerState& peer = peers_[source];
  // Whoever called, the progress thread looks after what follows.
  if (result.state != ReadState::kWhole) needs_progress_ = true;
  switch (result.state) {
    case ReadState::kWhole:
      Answer(source, copy.offer, "");
      return OnComplete(copy.operation, UCS_OK);
    case ReadState::kNotReadable:
      if (op->ended || failed_) {
        Answer(source, copy.offer, "its receive has ended");
        return OnComplete(copy.operation, UCS_ERR_CANCELED);
      }
      if (peer.readable) {
        guardian_->Say(RankInWords(local_) + " cannot read the memory of rank " +
                       std::to_string(source) + " any more (" + std::strerror(result.error) +
                       "): large tensors take two copies through shared memory from here on.");
        peer.readable = false;
      }
      op->in_use = false;
      table_.AddWaiting({source, op->key}, op->id);
      return Answer(source, copy.offer, kSendIt);
    case ReadState::kProcessEnded:
      if (!peer.gone) {
        peer.gone = gone_pending_ = true;
        peer.gone_reason = "its process ended without a word";
      }
      [[fallthrough]];
    case ReadState::kTakenBack:
      if (op->ended || failed_) return OnComplete(copy.operation, UCS_ERR_CANCELED);
      op->in_use = false;
      taken_back_.emplace_back(Clock::now(), copy.operation);
  }
}

// What was to be copied when the transport ends is not copied any more.
void Transport::DropCopies() {
  for (const Copy& copy : std::exchange(copies_, {})) {
    Answer(operations_.at(copy.operation)->peer, copy.offer, "it has ended");
    OnComplete(copy.operation, UCS_ERR_CANCELED);
  }
}

// A receive whose sender took the tensor back ends with the sender's reason, which may be on its
// way, or without one.
void Transport::SettleTakenBack() {
  while (!taken_back_.empty() && Clock::now() - taken_back_.front().first > kTimeForTheCause) {
    const auto found = operations_.find(taken_back_.front().second);
    taken_back_.pop_front();
    if (found == operations_.end() || found->second->ended) continue;
    Operation* op = found->second.get();
    End(op, SMP_ABORTED,
        peers_[op->peer].departed ? FailFor(*op)
                                  : Describe(*op) + " failed: the sender has ended its send");
  }
}

void Transport::OnTaken(uint32_t peer, uint64_t operation, const std::string& words) {
  const auto found = operations_.find(operation);
  if (found == operations_.end() || found->second->peer != peer || found->second->guard == 0) {
    return;
  }
  Operation* op = found->second.get();
  op->guard = 0;
  if (words.empty()) return OnComplete(operation, UCS_OK);
  if (words == kSendIt) {
    peers_[peer].reads_us = false;
    // Also for a send that was cancelled: its receiver waits.
    if (!failed_ && !peers_[peer].departed) return StartSend(op);
  }
  if (op->ended || failed_) return OnComplete(operation, UCS_ERR_CANCELED);
  op->in_use = false;
  End(op, SMP_ABORTED,
      peers_[peer].departed ? FailFor(*op)
                            : Describe(*op) + " was refused by the receiver: " + PlainText(words));
}

// What was offered to a rank that is gone is taken by nobody.
void Transport::WithdrawOffers(uint32_t peer) {
  std::vector<Operation*> offered;
  for (const auto& [id, op] : operations_) {
    if (op->peer == peer && op->guard != 0) offered.push_back(op.get());
  }
  for (Operation* op : offered) {
    op->guard = 0;
    if (!op->ended && !failed_ && peers_[peer].departed) {
      op->in_use = false;
      End(op, SMP_ABORTED, FailFor(*op));
    } else {
      OnComplete(op->id, UCS_ERR_CONNECTION_RESET);
    }
  }
}

// Nobody takes an offer that was never made.
void Transport::OnUnsentOffer(uint64_t operation, ucs_status_t status) {
  const auto found = operations_.find(operation);
  if (found == operations_.end() || found->second->guard == 0) return;
  found->second->guard = 0;
  OnComplete(operation, status);
}

// What has come and waits for its receive is not received any more: its senders hear of it.
void Transport::RefuseArrived() {
  table_.DropArrived([this](const MatchKey& key, const ArrivedMessage& message) {
    if (message.descriptor != nullptr) worker_->Drop(message.descriptor);
    if (message.offer) Answer(key.source, *message.offer, "it has ended");
  });
}

}  // namespace smp
