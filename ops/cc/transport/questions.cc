// "What are you doing?": one rank asks, the other's progress thread answers, whatever its main
// thread is stuck in.
#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>

#include "transport/json.h"
#include "transport/smp_timeline.h"
#include "transport/transport.h"
#include "transport/utf8.h"

namespace smp {
namespace {

// Of an activity or a label; escaped, a byte takes up to six.
constexpr size_t kMaxText = 400;
constexpr size_t kMaxWait = 200 + 6 * kMaxLabelBytes;
constexpr size_t kMaxCollectiveName = 100;
constexpr size_t kMostCollectives = 32;

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3f", value);
  return text;
}

// FNV-1a, as hexadecimal digits: names may be too long for all of them to fit into one message.
std::string Hash(const std::string& name) {
  uint32_t hash = 2166136261u;
  for (const unsigned char byte : name) hash = (hash ^ byte) * 16777619u;
  char text[16];
  std::snprintf(text, sizeof(text), "%08x", hash);
  return text;
}

// What a rank has come to, and waits in for others: as members of an object.
std::string CollectivesJson(const Activity::Moment& now) {
  const std::vector<std::string>& names = now.collectives;
  std::string json = ", \"collectives\": [";
  for (size_t i = 0; i < names.size() && i < kMostCollectives; ++i) {
    json += std::string(i == 0 ? "\"" : ", \"") + Hash(names[i]) + "\"";
  }
  json += std::string("], \"more_collectives\": ") +
          (names.size() > kMostCollectives ? "true" : "false");
  const std::string first =
      names.empty() ? "" : std::string(Utf8Within(names.front(), kMaxCollectiveName));
  return json + ", \"collective\": " + JsonString(first) +
         ", \"collective_seconds\": " + Number(now.collective_seconds);
}

}  // namespace

bool Transport::Ask(uint32_t peer, double timeout_s, std::string* answer) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (peer >= size_ || failed_ || shut_down_) return false;
  if (peer == rank_) {
    *answer = StatusJson(rank_);
    return true;
  }
  if (!peers_[peer].ready || peers_[peer].gone || peers_[peer].departed) return false;
  const auto question = static_cast<int64_t>(NewId());
  questions_[question] = "";
  lock.unlock();
  Enqueue([this, peer, question] { SendControl(peer, MessageKind::kAskStatus, "", question); });
  lock.lock();
  const auto deadline = Clock::now() + std::chrono::microseconds(int64_t(timeout_s * 1e6));
  changed_.wait_until(lock, deadline, [&] { return failed_ || !questions_[question].empty(); });
  *answer = std::move(questions_[question]);
  questions_.erase(question);
  return !answer->empty();
}

void Transport::OnAskStatus(uint32_t peer, int64_t question) {
  Enqueue([this, peer, question] {
    const std::string answer =
        question == 0 ? std::string(Utf8Within(StatusInWords(), 1000)) : StatusJson(peer);
    SendControl(peer, MessageKind::kStatus, answer, question);
  });
}

void Transport::OnStatus(uint32_t peer, const std::string& answer, int64_t question) {
  if (question == 0) return OnStallAnswer(peer, answer);
  const auto asked = questions_.find(question);
  if (asked == questions_.end()) return;  // nobody waits for it any more
  asked->second = answer;
  changed_.notify_all();
}

// What this rank does, and the oldest operation that waits for each peer: the asker's first, since
// not all may fit into one message.
std::string Transport::StatusJson(uint32_t asker) const {
  const Activity::Moment now = activity_.Now();
  std::string json = "{\"rank\": " + std::to_string(rank_) +
                     ", \"clock_ns\": " + std::to_string(smp_timeline_clock()) +
                     ", \"in_step\": " + (now.inside ? "true" : "false") +
                     ", \"program\": " + std::to_string(now.program) +
                     ", \"step\": " + std::to_string(now.step) +
                     ", \"step_seconds\": " + Number(now.step_seconds) +
                     ", \"averages\": " + std::to_string(activity_.averages()) +
                     ", \"activity\": " + JsonString(Utf8Within(now.text, kMaxText)) +
                     ", \"activity_seconds\": " + Number(now.text_seconds) + CollectivesJson(now) +
                     ", \"waits\": [";
  std::map<uint32_t, const Operation*> oldest;
  for (const auto& [id, op] : operations_) {
    // The message of a receive that UCX has in hand is there.
    if (op->ended || (!op->is_send && op->in_use)) continue;
    const Operation*& of_peer = oldest[op->peer];
    if (of_peer == nullptr || op->posted < of_peer->posted) of_peer = op.get();
  }
  std::vector<const Operation*> waits;
  for (const auto& [peer, op] : oldest) waits.push_back(op);
  std::stable_partition(waits.begin(), waits.end(),
                        [asker](const Operation* op) { return op->peer == asker; });
  const char* separator = "";
  for (const Operation* op : waits) {
    if (json.size() + kMaxWait > kMaxControlBytes) break;
    const std::chrono::duration<double> age = Clock::now() - op->posted;
    json += std::string(separator) + "{\"peer\": " + std::to_string(op->peer) +
            ", \"is_send\": " + (op->is_send ? "true" : "false") +
            ", \"label\": " + JsonString(op->label) +
            ", \"program\": " + std::to_string(op->key.program) +
            ", \"step\": " + std::to_string(op->key.step) +
            ", \"microbatch\": " + std::to_string(op->key.microbatch) +
            ", \"seconds\": " + Number(age.count()) + "}";
    separator = ", ";
  }
  return json + "]}";
}

}  // namespace smp
