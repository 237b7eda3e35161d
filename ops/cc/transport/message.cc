#include "transport/message.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "transport/utf8.h"

namespace smp {
namespace {

uint64_t Code(const char* bytes, size_t size, const SipKey& key, std::string_view payload) {
  constexpr uint64_t kNoMac = 0;
  constexpr size_t kMacAt = offsetof(MessageHead, mac);
  SipHash hash(key);
  hash.Add(bytes, kMacAt);
  hash.Add(&kNoMac, sizeof(kNoMac));
  hash.Add(bytes + sizeof(MessageHead), size - sizeof(MessageHead));
  hash.Add(payload.data(), payload.size());
  return hash.Finish();
}

}  // namespace

std::string EncodeMessage(MessageHead head, const int64_t* dims, std::string_view label,
                          const SipKey* key, std::string_view covered) {
  label = Utf8Within(label, kMaxLabelBytes);
  head.magic = kMagic;
  head.version = kVersion;
  head.label_bytes = static_cast<uint8_t>(label.size());
  head.reserved = 0;
  head.mac = 0;
  std::string bytes;
  bytes.reserve(sizeof(head) + head.ndim * sizeof(int64_t) + label.size());
  bytes.append(reinterpret_cast<const char*>(&head), sizeof(head));
  bytes.append(reinterpret_cast<const char*>(dims), head.ndim * sizeof(int64_t));
  bytes.append(label);
  if (key != nullptr) {
    head.mac = Code(bytes.data(), bytes.size(), *key, covered);
    std::memcpy(&bytes[offsetof(MessageHead, mac)], &head.mac, sizeof(head.mac));
  }
  return bytes;
}

bool DecodeMessage(const void* bytes, size_t size, MessageView* view) {
  if (size < sizeof(MessageHead)) return false;
  const char* p = static_cast<const char*>(bytes);
  std::memcpy(&view->head, p, sizeof(MessageHead));
  const MessageHead& head = view->head;
  if (head.magic != kMagic || head.version != kVersion) return false;
  if (size != sizeof(head) + head.ndim * sizeof(int64_t) + head.label_bytes) return false;
  view->dims.resize(head.ndim);
  if (head.ndim > 0) std::memcpy(view->dims.data(), p + sizeof(head), head.ndim * sizeof(int64_t));
  view->label.assign(p + sizeof(head) + head.ndim * sizeof(int64_t), head.label_bytes);
  return true;
}

bool VerifyMessage(const void* bytes, size_t size, const SipKey& key, std::string_view covered) {
  const char* p = static_cast<const char*>(bytes);
  uint64_t mac;
  std::memcpy(&mac, p + offsetof(MessageHead, mac), sizeof(mac));
  return mac == Code(p, size, key, covered);
}

bool SequenceWindow::Accept(uint64_t sequence) {
  if (sequence >= next_) {
    const uint64_t fresh = std::min(sequence - next_ + 1, kWindow);
    for (uint64_t i = 0; i < fresh; ++i) seen_[(sequence - i) % kWindow] = false;
    next_ = sequence + 1;
  } else if (next_ - sequence > kWindow || seen_[sequence % kWindow]) {
    return false;
  }
  seen_[sequence % kWindow] = true;
  return true;
}

}  // namespace smp
