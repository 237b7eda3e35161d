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
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/transport.h"

namespace smp {

bool Transport::CanRead(const Address& address) const {
  if (options_.read_memory == 0 || address.host_id != local_.host_id) return false;
  std::array<uint8_t, 32> nonce{};
  return ReadPeerMemory(address.pid, address.nonce_at, nonce.data(), nonce.size()) == 0 &&
         nonce == address.nonce;
}

void Transport::SendOffer(Operation* op, MessageHead head) {
  op->guard = offer_salt_ + op->id;
  const Offer offer{reinterpret_cast<uint64_t>(op->buffer.data), op->buffer.bytes,
                    reinterpret_cast<uint64_t>(&op->guard), op->guard, op->id};
  head.kind = MessageKind::kOffer;
  SendWithCode(head, op->dims, op->label, {reinterpret_cast<const char*>(&offer), sizeof(offer)},
               &peers_[op->peer].send_key);
}

void Transport::OnOffer(const MessageView& view, const std::string& payload) {
  const uint32_t source = view.head.source;
  Offer offer;
  if (payload.size() != sizeof(offer) || !peers_[source].readable) {
    Refuse("it offers a tensor in no form that was agreed upon", source);
    return;
  }
  std::memcpy(&offer, payload.data(), sizeof(offer));
  if (failed_ || left_) {
    SendControl(source, MessageKind::kTaken, "it ends", static_cast<int64_t>(offer.operation));
    return;
  }
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
    SendControl(view.head.source, MessageKind::kTaken, "it does not fit its receive",
                static_cast<int64_t>(offer.operation));
    return;
  }
  op->in_use = true;
  copies_.push_back({op->id, peers_[op->peer].address.pid, offer, op->buffer.data});
}

// Copies are made without the lock, by whoever held it: other operations go on beside them.
bool Transport::RunCopies(std::unique_lock<std::mutex>* lock) {
  if (copies_.empty()) return false;
  std::vector<Copy> copies;
  copies.swap(copies_);
  copying_ += static_cast<int>(copies.size());
  for (const Copy& copy : copies) {
    lock->unlock();
    int error = 0;
    const bool whole = ReadOffer(copy.pid, copy.offer, copy.to, &error);
    lock->lock();
    OnCopied(copy, whole, error);
    if (--copying_ == 0) changed_.notify_all();
  }
  return true;
}

void Transport::OnCopied(const Copy& copy, bool whole, int error) {
  Operation* op = operations_.at(copy.operation).get();
  const uint32_t source = op->peer;
  if (whole) {
    SendControl(source, MessageKind::kTaken, "", static_cast<int64_t>(copy.offer.operation));
    return OnComplete(copy.operation, UCS_OK);
  }
  PeerState& peer = peers_[source];
  if (error == ESRCH && !peer.departed && !op->ended && !failed_ && !left_) {
    // It ends with what is said of a rank that is lost.
    op->in_use = false;
    if (!peer.gone) OnPeerError(source, "its process has ended");
    return;
  }
  if (op->ended || failed_) return OnComplete(copy.operation, UCS_ERR_CANCELED);
  op->in_use = false;
  if (peer.departed) return End(op, SMP_ABORTED, FailFor(*op));
  End(op, error == 0 || error == EFAULT ? SMP_ABORTED : SMP_INTERNAL,
      Describe(*op) + " failed: " +
          (error == 0 || error == EFAULT
               ? "the sender has ended its send"
               : std::string("reading the sender's memory: ") + std::strerror(error)));
}

void Transport::OnTaken(uint32_t peer, uint64_t operation, const std::string& refusal) {
  const auto found = operations_.find(operation);
  if (found == operations_.end() || found->second->peer != peer || found->second->guard == 0) {
    return;
  }
  found->second->guard = 0;
  OnComplete(operation, refusal.empty() ? UCS_OK : UCS_ERR_CANCELED);
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

}  // namespace smp
