// Which receive waits for which message, and which message came before its receive.
//
// Both sides meet under the full key (source rank, program, step, edge, microbatch), whichever
// comes first; a key is used once.
#ifndef SMP_TF_OPS_CC_TRANSPORT_MATCHING_H_
#define SMP_TF_OPS_CC_TRANSPORT_MATCHING_H_

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "transport/message.h"
#include "transport/peer_memory.h"

namespace smp {

struct MatchKey {
  uint32_t source;
  MessageKey key;

  bool operator==(const MatchKey& other) const {
    return source == other.source && key == other.key;
  }
};

struct MatchKeyHash {
  size_t operator()(const MatchKey& k) const {
    uint64_t h = k.source;
    for (uint64_t word :
         {k.key.program, static_cast<uint64_t>(k.key.step), k.key.edge, k.key.microbatch}) {
      h = (h ^ word) * 0x9e3779b97f4a7c15u;
      h ^= h >> 32;
    }
    return h;
  }
};

// A message that came before its receive: its data if it was small, else UCX's descriptor of it,
// or where it lies in the memory of its sender.
struct ArrivedMessage {
  MessageView view;
  std::string data;
  void* descriptor = nullptr;
  std::optional<Offer> offer;
};

class MatchTable {
 public:
  // Both return false if the key is taken.
  bool AddWaiting(const MatchKey& key, uint64_t operation) {
    return waiting_.emplace(key, operation).second;
  }
  bool AddArrived(const MatchKey& key, ArrivedMessage message) {
    return arrived_.emplace(key, std::move(message)).second;
  }

  // Takes out the operation that waits for this key; 0 if none does.
  uint64_t TakeWaiting(const MatchKey& key) {
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) return 0;
    const uint64_t operation = found->second;
    waiting_.erase(found);
    return operation;
  }

  bool TakeArrived(const MatchKey& key, ArrivedMessage* message) {
    const auto found = arrived_.find(key);
    if (found == arrived_.end()) return false;
    *message = std::move(found->second);
    arrived_.erase(found);
    return true;
  }

  size_t arrived() const { return arrived_.size(); }

  // Calls `visit` with the key of every message that waits for its receive.
  template <typename Visit>
  void ForEachArrived(Visit visit) const {
    for (const auto& [key, message] : arrived_) visit(key);
  }

  // Empties the table of messages, handing each with its key to `drop`.
  template <typename Drop>
  void DropArrived(Drop drop) {
    for (const auto& [key, message] : arrived_) drop(key, message);
    arrived_.clear();
  }

 private:
  std::unordered_map<MatchKey, uint64_t, MatchKeyHash> waiting_;
  std::unordered_map<MatchKey, ArrivedMessage, MatchKeyHash> arrived_;
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_MATCHING_H_
