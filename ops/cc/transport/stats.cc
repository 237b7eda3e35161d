// The transport's statistics as JSON.
#include "transport/json.h"
#include "transport/transport.h"

namespace smp {

std::string Transport::Lanes(uint32_t peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  return worker_ ? worker_->Lanes(peer) : "";
}

std::string Transport::Stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string json =
      "{\"rank\": " + std::to_string(rank_) + ", \"size\": " + std::to_string(size_) +
      ", \"refused_messages\": " + std::to_string(refused_) +
      ", \"pending_operations\": " + std::to_string(operations_.size()) +
      ", \"unmatched_messages\": " + std::to_string(table_.arrived()) +
      ", \"progress_rounds\": " + std::to_string(rounds_) +
      ", \"huge_pages\": " + std::to_string(huge_pages_.regions()) + ", \"peers\": [";
  for (uint32_t r = 0; r < size_; ++r) {
    const PeerState& peer = peers_[r];
    json += std::string(r == 0 ? "" : ", ") + "{\"rank\": " + std::to_string(r) +
            ", \"host\": " + JsonString(peer.address.hostname) +
            ", \"lanes\": " + JsonString(worker_ ? worker_->Lanes(r) : "") +
            ", \"reads_memory\": " + (peer.readable ? "true" : "false") +
            ", \"sent_messages\": " + std::to_string(peer.traffic.sent_messages) +
            ", \"sent_bytes\": " + std::to_string(peer.traffic.sent_bytes) +
            ", \"received_messages\": " + std::to_string(peer.traffic.received_messages) +
            ", \"received_bytes\": " + std::to_string(peer.traffic.received_bytes) + "}";
  }
  json += "], \"edges\": [";
  bool first = true;
  for (const auto& [key, count] : edges_) {
    const auto& [program, edge, peer, is_send] = key;
    json += std::string(first ? "" : ", ") + "{\"program\": " + std::to_string(program) +
            ", \"edge\": " + std::to_string(edge) + ", \"peer\": " + std::to_string(peer) +
            ", \"direction\": " + (is_send ? "\"sent\"" : "\"received\"") +
            ", \"messages\": " + std::to_string(count.first) +
            ", \"bytes\": " + std::to_string(count.second) + "}";
    first = false;
  }
  json += "], \"unmatched\": [";
  first = true;
  table_.ForEachArrived([&](const MatchKey& unmatched) {
    json += std::string(first ? "" : ", ") + "{\"source\": " + std::to_string(unmatched.source) +
            ", \"program\": " + std::to_string(unmatched.key.program) +
            ", \"edge\": " + std::to_string(unmatched.key.edge) + "}";
    first = false;
  });
  return json + "]}";
}

}  // namespace smp
