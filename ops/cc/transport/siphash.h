// SipHash-2-4: the keyed code that every message header carries.
//
// Source: J.-P. Aumasson, D. J. Bernstein, "SipHash: a fast short-input PRF", 2012.
#ifndef SMP_TF_OPS_CC_TRANSPORT_SIPHASH_H_
#define SMP_TF_OPS_CC_TRANSPORT_SIPHASH_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace smp {

struct SipKey {
  uint64_t low = 0;
  uint64_t high = 0;
};

// A running code over several pieces of a message.
class SipHash {
 public:
  explicit SipHash(const SipKey& key)
      : v0_(key.low ^ 0x736f6d6570736575u),
        v1_(key.high ^ 0x646f72616e646f6du),
        v2_(key.low ^ 0x6c7967656e657261u),
        v3_(key.high ^ 0x7465646279746573u) {}

  void Add(const void* data, size_t bytes) {
    const auto* p = static_cast<const uint8_t*>(data);
    total_ += bytes;
    for (; bytes > 0 && held_ > 0; --bytes) AddByte(*p++);
    for (; bytes >= 8; bytes -= 8, p += 8) {
      uint64_t word;
      std::memcpy(&word, p, 8);
      Mix(word);
    }
    for (; bytes > 0; --bytes) AddByte(*p++);
  }

  uint64_t Finish() {
    Mix(word_ | (total_ << 56));
    v2_ ^= 0xff;
    for (int i = 0; i < 4; ++i) Round();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }

 private:
  static uint64_t Rotate(uint64_t x, int n) { return (x << n) | (x >> (64 - n)); }

  void AddByte(uint8_t byte) {
    word_ |= uint64_t{byte} << (8 * held_);
    if (++held_ == 8) {
      Mix(word_);
      word_ = 0;
      held_ = 0;
    }
  }

  void Mix(uint64_t word) {
    v3_ ^= word;
    Round();
    Round();
    v0_ ^= word;
  }

  void Round() {
    v0_ += v1_, v1_ = Rotate(v1_, 13), v1_ ^= v0_, v0_ = Rotate(v0_, 32);
    v2_ += v3_, v3_ = Rotate(v3_, 16), v3_ ^= v2_;
    v0_ += v3_, v3_ = Rotate(v3_, 21), v3_ ^= v0_;
    v2_ += v1_, v1_ = Rotate(v1_, 17), v1_ ^= v2_, v2_ = Rotate(v2_, 32);
  }

  uint64_t v0_, v1_, v2_, v3_;
  uint64_t word_ = 0;
  uint64_t total_ = 0;
  int held_ = 0;
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_SIPHASH_H_
