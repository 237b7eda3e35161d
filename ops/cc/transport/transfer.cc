// Operations and the messages they meet: the part of the transport that moves tensors.
#include <cstring>
#include <utility>

#include "transport/smp_timeline.h"
#include "transport/transport.h"
#include "transport/utf8.h"

namespace smp {
namespace {

// A send that starts or whose memory is free; a receive that is posted or whose tensor is there.
void Note(const Operation& op, bool is_end, uint64_t bytes) {
  if (!smp_timeline_is_on() || op.key.program >= SMP_RESERVED_PROGRAMS) return;
  smp_timeline_point point{};
  point.program = op.key.program;
  point.step = op.key.step;
  point.edge = op.key.edge;
  point.microbatch = op.key.microbatch;
  point.bytes = bytes;
  point.peer = op.peer;
  point.event = op.is_send ? SMP_EVENT_SEND : SMP_EVENT_RECV;
  point.is_end = is_end ? 1 : 0;
  smp_timeline_note(&point);
}

// As much of a label as travels, and stands in messages.
std::string_view ShortLabel(const char* label) {
  return label == nullptr ? std::string_view() : Utf8Within(label, kMaxLabelBytes);
}

}  // namespace

std::string Transport::Describe(const Operation& op) const {
  return std::string(op.is_send ? "send of '" : "receive of '") + op.label + "' (step " +
         std::to_string(op.key.step) + ", edge " + std::to_string(op.key.edge) + ", microbatch " +
         std::to_string(op.key.microbatch) + (op.is_send ? ") to " : ") from ") +
         PeerInWords(op.peer);
}

int Transport::CodeOf(ucs_status_t status) {
  switch (status) {
    case UCS_OK:
      return SMP_OK;
    case UCS_ERR_CANCELED:
      return SMP_CANCELLED;
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
      return SMP_UNAVAILABLE;
    default:
      return SMP_INTERNAL;
  }
}

void Transport::Send(const smp_send_params& params) {
  auto op = std::make_unique<Operation>();
  op->id = params.id;
  op->is_send = true;
  op->peer = params.destination;
  op->key = {params.key.program, params.key.step, params.key.edge, params.key.microbatch};
  op->label = ShortLabel(params.label);
  op->done = params.done;
  op->release = params.release;
  op->arg = params.arg;
  op->dtype = params.dtype;
  op->dims.assign(params.dims, params.dims + params.ndim);
  op->buffer = params.buffer;
  Note(*op, false, op->buffer.bytes);
  Submit({std::move(op), nullptr});
}

void Transport::Receive(const smp_recv_params& params) {
  auto op = std::make_unique<Operation>();
  op->id = params.id;
  op->peer = params.source;
  op->key = {params.key.program, params.key.step, params.key.edge, params.key.microbatch};
  op->label = ShortLabel(params.label);
  op->done = params.done;
  op->release = params.release;
  op->arg = params.arg;
  op->allocate = params.allocate;
  Note(*op, false, 0);
  Submit({std::move(op), nullptr});
}

void Transport::Cancel(uint64_t id) {
  Enqueue([this, id] {
    const auto found = operations_.find(id);
    if (found == operations_.end()) return;
    End(found->second.get(), SMP_CANCELLED, Describe(*found->second) + " was cancelled");
  });
}

void Transport::Withdraw(uint64_t id) {
  Enqueue([this, id] {
    const auto found = operations_.find(id);
    if (found == operations_.end() || found->second->in_use) return;
    End(found->second.get(), SMP_CANCELLED, Describe(*found->second) + " was withdrawn");
  });
}

void Transport::CancelAll(const std::string& reason) {
  Enqueue([this, reason] { EndAll(SMP_CANCELLED, reason); });
}

void Transport::Start(std::unique_ptr<Operation> operation) {
  Operation* op = operation.get();
  op->posted = Clock::now();
  operations_.emplace(op->id, std::move(operation));
  std::string why;
  if (op->peer >= size_) {
    return End(op, SMP_INVALID_ARGUMENT,
               "rank " + std::to_string(op->peer) + " is not one of the " + std::to_string(size_) +
                   " ranks of this job");
  }
  if (failed_) {
    std::lock_guard<std::mutex> lock(cause_mutex_);
    return End(op, cause_code_, Describe(*op) + " ended: " + cause_message_);
  }
  if (left_ || shut_down_) {
    return End(op, SMP_FAILED_PRECONDITION, Describe(*op) + kTooLate);
  }
  if (!peers_[op->peer].verified || !peers_[op->peer].ready) {
    return End(op, SMP_FAILED_PRECONDITION,
               Describe(*op) + " comes before the transport is connected");
  }
  if (op->is_send) {
    StartSend(op);
  } else {
    StartReceive(op);
  }
}

void Transport::StartSend(Operation* op) {
  if (op->buffer.memory_kind != SMP_MEMORY_HOST || op->buffer.ready_event != nullptr) {
    return End(op, SMP_UNIMPLEMENTED, Describe(*op) + ": only host memory can be sent");
  }
  PeerState& peer = peers_[op->peer];
  if (peer.departed) return End(op, SMP_ABORTED, FailFor(*op));
  MessageHead head{};
  head.kind = MessageKind::kData;
  head.ndim = static_cast<uint8_t>(op->dims.size());
  head.source = rank_;
  head.destination = op->peer;
  head.sequence = peer.next_sequence++;
  head.key = op->key;
  head.bytes = op->buffer.bytes;
  head.dtype = op->dtype;
  op->in_use = true;
  if (peer.reads_us && options_.read_memory != 0 && op->buffer.bytes > kEagerBytes)
    return SendOffer(op, head);
  std::string_view covered;
  if (op->buffer.bytes <= kEagerBytes)
    covered = {static_cast<const char*>(op->buffer.data), op->buffer.bytes};
  const std::string header =
      EncodeMessage(head, op->dims.data(), op->label, &peer.send_key, covered);
  const ucs_status_t status =
      worker_->Send(op->peer, header, op->buffer.data, op->buffer.bytes, false, op->id);
  if (status == UCS_INPROGRESS) {
    needs_progress_ = true;
  } else {
    OnComplete(op->id, status);
  }
}

void Transport::StartReceive(Operation* op) {
  const MatchKey key{op->peer, op->key};
  ArrivedMessage message;
  if (table_.TakeArrived(key, &message)) {
    if (message.offer) return Take(op, message.view, *message.offer);
    const bool rendezvous = message.descriptor != nullptr;
    void* data = rendezvous ? message.descriptor : message.data.data();
    const bool kept = Deliver(op, message.view, data, message.view.head.bytes, rendezvous);
    if (rendezvous && !kept) worker_->Drop(message.descriptor);
    return;
  }
  if (peers_[op->peer].departed) return End(op, SMP_ABORTED, FailFor(*op));
  if (!table_.AddWaiting(key, op->id)) {
    End(op, SMP_INVALID_ARGUMENT, "a " + Describe(*op) + " is already waiting: keys are used once");
  }
}

bool Transport::OnData(const MessageView& view, void* data, size_t bytes, bool rendezvous) {
  if (failed_ || left_ || shut_down_) return false;
  const MatchKey key{view.head.source, view.head.key};
  const uint64_t waiting = table_.TakeWaiting(key);
  if (waiting != 0) return Deliver(operations_.at(waiting).get(), view, data, bytes, rendezvous);
  ArrivedMessage message;
  message.view = view;
  if (rendezvous) {
    message.descriptor = data;
  } else if (bytes > 0) {
    message.data.assign(static_cast<const char*>(data), bytes);
  }
  return Keep(key, std::move(message)) && rendezvous;
}

// Keeps a message until its receive is posted. False if there is one of this key.
bool Transport::Keep(const MatchKey& key, ArrivedMessage message) {
  const std::string label = message.view.label;
  if (table_.AddArrived(key, std::move(message))) return true;
  Fail("duplicate",
       PeerInWords(key.source) + " sent '" + label + "' (step " + std::to_string(key.key.step) +
           ", edge " + std::to_string(key.key.edge) + ", microbatch " +
           std::to_string(key.key.microbatch) + ") twice to rank " + std::to_string(rank_),
       1, SMP_INTERNAL);
  return false;
}

// Provides memory of the receiver's for a message. False if that ended the operation.
bool Transport::Place(Operation* op, const MessageView& view, size_t bytes) {
  // It is there if the message was offered before, and could not be read.
  if (op->buffer.data != nullptr && op->buffer.bytes == bytes) return true;
  smp_message_info info{};
  info.source = view.head.source;
  info.dtype = view.head.dtype;
  info.ndim = view.head.ndim;
  info.dims = view.dims.data();
  info.bytes = bytes;
  info.label = view.label.c_str();
  smp_buffer buffer{};
  char error[1024] = "";
  const int code = op->allocate(op->arg, &info, &buffer, error, sizeof(error));
  if (code != SMP_OK) {
    End(op, code, error);
    return false;
  }
  if (buffer.memory_kind != SMP_MEMORY_HOST || buffer.ready_event != nullptr) {
    End(op, SMP_UNIMPLEMENTED, Describe(*op) + ": only host memory can receive");
    return false;
  }
  if (buffer.bytes < bytes) {
    End(op, SMP_INTERNAL, Describe(*op) + ": the buffer is smaller than the message");
    return false;
  }
  op->buffer = buffer;
  op->buffer.bytes = bytes;
  return true;
}

// Places a message into memory of the receiver's. Returns whether a descriptor was consumed.
bool Transport::Deliver(Operation* op, const MessageView& view, void* data, size_t bytes,
                        bool rendezvous) {
  if (!Place(op, view, bytes)) return false;
  if (!rendezvous) {
    if (bytes > 0) std::memcpy(op->buffer.data, data, bytes);
    CountEnded(*op, bytes);
    End(op, SMP_OK, "");
    return false;
  }
  op->in_use = true;
  const ucs_status_t status = worker_->FetchRendezvous(data, op->buffer.data, bytes, op->id);
  if (status == UCS_INPROGRESS) {
    needs_progress_ = true;
  } else {
    OnComplete(op->id, status);
  }
  return true;
}

void Transport::OnComplete(uint64_t operation, ucs_status_t status) {
  if (const auto control = controls_.extract(operation)) {
    if (controls_.empty()) changed_.notify_all();
    if (status != UCS_OK) OnUnsent(control.mapped(), status);
    return;
  }
  const auto found = operations_.find(operation);
  if (found == operations_.end()) return;
  Operation* op = found->second.get();
  op->in_use = false;
  if (op->ended) return Release(op);
  if (status == UCS_OK) {
    CountEnded(*op, op->buffer.bytes);
    return End(op, SMP_OK, "");
  }
  if (failed_) {
    std::lock_guard<std::mutex> lock(cause_mutex_);
    return End(op, cause_code_, Describe(*op) + " ended: " + cause_message_);
  }
  if (status == UCS_ERR_CANCELED && op->is_send) {
    return End(op, SMP_ABORTED, Describe(*op) + " was refused by the receiver");
  }
  End(op, CodeOf(status), Describe(*op) + " failed: " + ucs_status_string(status));
}

void Transport::CountEnded(const Operation& op, uint64_t bytes) {
  Note(op, true, bytes);
  PeerState& peer = peers_[op.peer];
  (op.is_send ? peer.traffic.sent_messages : peer.traffic.received_messages) += 1;
  (op.is_send ? peer.traffic.sent_bytes : peer.traffic.received_bytes) += bytes;
  auto& edge = edges_[{op.key.program, op.key.edge, op.peer, op.is_send}];
  edge.first += 1;
  edge.second += bytes;
  peer.stall_asked = peer.stall_reported = false;
}

// The status goes out now; the buffer is released as soon as nobody has a hand on it.
void Transport::End(Operation* op, int code, const std::string& message) {
  if (op->ended) return;
  op->ended = true;
  // Found by key, so that a receive that is cancelled leaves no trace in the table.
  if (!op->is_send && !op->in_use) {
    const MatchKey key{op->peer, op->key};
    const uint64_t waiting = table_.TakeWaiting(key);
    if (waiting != 0 && waiting != op->id) table_.AddWaiting(key, waiting);
  }
  op->done_due = op->in_use;
  if (op->in_use) {
    endings_.push_back({op->done, nullptr, op->arg, code, message, op->id});
  } else {
    endings_.push_back({op->done, op->release, op->arg, code, message, 0});
    operations_.erase(op->id);
  }
}

void Transport::EndAll(int code, const std::string& message) {
  std::vector<Operation*> all;
  for (const auto& [id, op] : operations_) all.push_back(op.get());
  for (Operation* op : all) End(op, code, Describe(*op) + " ended: " + message);
}

}  // namespace smp
