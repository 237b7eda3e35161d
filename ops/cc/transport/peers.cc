// Who the peers are, and whether they are there.
//
//   rank a                                rank b
//     │ ── proof(secret, a→b, nonces) ──▶   │  verified[a]
//     │ ◀── proof(secret, b→a, nonces) ──   │
//     │ ── ready (keyed) ──▶                │  ready[a]: messages to a may be sent
//
// A proof that comes before the addresses are known can be anybody's: it is dropped. Whoever takes
// another one's proof and has not heard that it is ready sends its own again, which is not too
// early.
//
// The nonces travel with the addresses and serve as challenges; pair_codes.h says what a proof is.
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "transport/pair_codes.h"
#include "transport/plain_text.h"
#include "transport/transport.h"

namespace smp {

std::string Transport::RankInWords(const Address& address) {
  return "rank " + std::to_string(address.rank) + " (host " + PlainText(address.hostname) +
         ", process " + std::to_string(address.pid) + ")";
}

std::string Transport::PeerInWords(uint32_t peer) const {
  if (peer >= size_ || !met_) return "rank " + std::to_string(peer);
  return RankInWords(peers_[peer].address);
}

void Transport::Connect(const std::vector<std::string>& addresses, const std::string& secret) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (shut_down_) throw std::runtime_error("the transport was shut down");
  if (met_) throw std::invalid_argument("the transport is connected already");
  if (secret.size() < 16) {
    throw std::invalid_argument("the job's secret must be 16 bytes or more, received " +
                                std::to_string(secret.size()));
  }
  std::vector<Address> decoded(size_);
  for (uint32_t r = 0; r < size_; ++r) {
    const std::string who = "the address of rank " + std::to_string(r);
    if (!Address::Decode(addresses[r], &decoded[r])) {
      throw std::invalid_argument(who + " is not an address of this version of smp_tf");
    }
    if (decoded[r].rank != r || decoded[r].size != size_) {
      throw std::invalid_argument(who + " says rank " + std::to_string(decoded[r].rank) + " of " +
                                  std::to_string(decoded[r].size) + ", expected rank " +
                                  std::to_string(r) + " of " + std::to_string(size_));
    }
  }
  if (addresses[rank_] != encoded_address_) {
    throw std::invalid_argument("the address of rank " + std::to_string(rank_) +
                                " is not this process's own: was it exchanged in rank order?");
  }
  for (uint32_t r = 0; r < size_; ++r) {
    PeerState& peer = peers_[r];
    peer.address = std::move(decoded[r]);
    peer.same_host = peer.address.host_id == local_.host_id;
    if (options_.single_host && !peer.same_host) {
      throw std::invalid_argument(RankInWords(peer.address) + " is on another host than " +
                                  RankInWords(local_) +
                                  ": open the transport with single_host off");
    }
    peer.send_key = KeyOf(secret, local_, peer.address);
    peer.receive_key = KeyOf(secret, peer.address, local_);
    peer.own_proof = ProofOf(secret, local_, peer.address);
    peer.expected_proof = ProofOf(secret, peer.address, local_);
  }
  met_ = true;
  Meet();
  lock.unlock();
  Wake();
}

void Transport::Meet() {
  if (options_.read_memory != 0) {
    std::vector<int32_t> here;
    for (const PeerState& peer : peers_) {
      if (peer.same_host) here.push_back(peer.address.pid);
    }
    // Before the first proof is sent: who has it tries to read.
    readers_allowed_ = here.size() > 1 && AllowReaders(here);
  }
  for (uint32_t r = 0; r < size_; ++r) {
    PeerState& peer = peers_[r];
    if (peer.same_host && r != rank_) {
      peer.pidfd = static_cast<int>(syscall(SYS_pidfd_open, peer.address.pid, 0));
      if (peer.pidfd >= 0 && ProcessStartTime(peer.address.pid) == peer.address.start_time) {
        Watch(peer.pidfd, r);
      } else if (peer.pidfd >= 0 || errno == ESRCH) {
        peer.gone = gone_pending_ = true;
        peer.gone_reason = "its process had ended before this rank connected";
        continue;
      }
      // Without pidfd_open (Linux before 5.3) UCX's keepalive finds a dead peer, later.
    }
    worker_->Connect(r, peer.address.worker, r == rank_);
    SendControl(r, MessageKind::kProof, std::string(AsText(peer.own_proof)), 0);
  }
}

int Transport::WaitConnected(double timeout_s, std::string* error) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto missing = [this] {
    std::string names;
    for (uint32_t r = 0; r < size_; ++r) {
      if (peers_[r].verified && peers_[r].ready) continue;
      names += (names.empty() ? "" : ", ") + PeerInWords(r);
    }
    return names;
  };
  const auto deadline = Clock::now() + std::chrono::microseconds(int64_t(timeout_s * 1e6));
  changed_.wait_until(lock, deadline, [&] { return failed_ || shut_down_ || missing().empty(); });
  if (failed_) {
    std::lock_guard<std::mutex> cause_lock(cause_mutex_);
    *error = cause_message_;
    return SMP_ABORTED;
  }
  if (shut_down_) {
    *error = "the transport of rank " + std::to_string(rank_) + " was shut down";
    return SMP_CANCELLED;
  }
  const std::string names = missing();
  if (names.empty()) {
    // Connections are made by now.
    own_descriptors_->CloseOnExec();
    return SMP_OK;
  }
  *error = "rank " + std::to_string(rank_) + " waits for " + names +
           " to connect and to prove the job's secret" +
           (refused_ > 0 ? "; " + std::to_string(refused_) + " messages did not prove it" : "");
  return SMP_DEADLINE_EXCEEDED;
}

void Transport::CheckProof(uint32_t source, const std::string& proof) {
  PeerState& peer = peers_[source];
  Digest received;
  if (proof.size() != received.size()) return;
  std::memcpy(received.data(), proof.data(), received.size());
  if (!SameDigest(received, peer.expected_proof)) {
    Refuse("its proof of the job's secret is wrong", source);
    return;
  }
  if (peer.verified) return;
  peer.verified = true;
  peer.readable = CanRead(peer.address);
  // Ours may have come before it knew us, and was dropped then.
  if (!peer.ready) SendControl(source, MessageKind::kProof, std::string(AsText(peer.own_proof)), 0);
  SendControl(source, MessageKind::kReady, "", peer.readable ? 1 : 0);
  changed_.notify_all();
}

void Transport::OnReady(uint32_t peer, bool reads_us) {
  peers_[peer].ready = true;
  peers_[peer].reads_us = reads_us;
  changed_.notify_all();
}

bool Transport::Refuse(const std::string& why, uint32_t claimed_source) {
  if (refused_++ == 0) {
    guardian_->Say("rank " + std::to_string(rank_) + " (host " + local_.hostname +
                   ") refused a message that claims to come from rank " +
                   std::to_string(claimed_source) + ": " + why +
                   ". It was dropped; more of them are dropped without a word.");
  }
  return false;
}

bool Transport::OnMessage(const void* header, size_t header_bytes, void* data, size_t bytes,
                          bool rendezvous) {
  if (worker_ == nullptr) return false;  // UCX is being closed, and says what it still had
  MessageView view;
  if (!DecodeMessage(header, header_bytes, &view)) {
    return Refuse("it is no message of this version of smp_tf", size_);
  }
  const uint32_t source = view.head.source;
  if (source >= size_ || view.head.destination != rank_) {
    return Refuse("its ranks are not those of this pair", source);
  }
  PeerState& peer = peers_[source];
  const bool control = view.head.kind != MessageKind::kData;
  if (control && (rendezvous || bytes > kMaxControlBytes)) {
    return Refuse("it is too long for its kind", source);
  }
  if (!control && rendezvous != (bytes > kEagerBytes)) {
    return Refuse("it does not come in the way in which one of its length is sent", source);
  }
  // What is fetched later is not here yet: `data` is a descriptor.
  const std::string_view covered(rendezvous ? nullptr : static_cast<const char*>(data),
                                 rendezvous ? 0 : bytes);
  const std::string payload(control ? covered : "");
  if (view.head.kind == MessageKind::kProof) {
    if (met_) CheckProof(source, payload);
    return false;
  }
  if (!peer.verified) return Refuse("its sender has not proved the job's secret", source);
  if (!VerifyMessage(header, header_bytes, peer.receive_key, covered)) {
    return Refuse("its code is wrong", source);
  }
  if (!peer.window.Accept(view.head.sequence)) return Refuse("it came before", source);
  if (view.head.bytes != bytes) return Refuse("its length is not the one it states", source);
  switch (view.head.kind) {
    case MessageKind::kData:
      return OnData(view, data, bytes, rendezvous);
    case MessageKind::kReady:
      OnReady(source, view.head.argument != 0);
      break;
    case MessageKind::kAbort:
      OnAbort(payload, static_cast<int>(view.head.argument));
      break;
    case MessageKind::kGoodbye:
      OnGoodbye(source, payload);
      break;
    case MessageKind::kAskStatus:
      OnAskStatus(source, view.head.argument);
      break;
    case MessageKind::kStatus:
      OnStatus(source, payload, view.head.argument);
      break;
    case MessageKind::kOffer:
      OnOffer(view, payload);
      break;
    case MessageKind::kTaken:
      OnTaken(source, static_cast<uint64_t>(view.head.argument), payload);
      break;
    default:
      return Refuse("its kind is unknown", source);
  }
  return false;
}

void Transport::OnPeerError(uint32_t peer, const std::string& reason) {
  if (peers_[peer].gone) return;
  peers_[peer].gone = gone_pending_ = true;
  peers_[peer].gone_reason = "the connection to it failed (" + reason + ")";
}

void Transport::OnPeerExit(uint32_t peer) {
  epoll_ctl(epoll_, EPOLL_CTL_DEL, peers_[peer].pidfd, nullptr);
  if (peers_[peer].gone) return;
  peers_[peer].gone = gone_pending_ = true;
  peers_[peer].gone_reason = "its process ended without a word";
}

void Transport::HandleGonePeers() {
  gone_pending_ = false;
  changed_.notify_all();
  for (uint32_t r = 0; r < size_; ++r) {
    const PeerState& peer = peers_[r];
    if (!peer.gone) continue;
    if (!peer.departed && !failed_ && !left_) {
      Fail("lost",
           PeerInWords(r) + " was lost: " + peer.gone_reason + ". Rank " + std::to_string(rank_) +
               " (host " + local_.hostname + ") was " + activity_.StepInWords(),
           1, SMP_UNAVAILABLE);
    }
    WithdrawOffers(r);
  }
}

}  // namespace smp
