// SHA-256 and HMAC-SHA256, for proving the job's secret to a peer.
//
// Source: FIPS 180-4 (SHA-256) and RFC 2104 (HMAC).
#ifndef SMP_TF_OPS_CC_TRANSPORT_SHA256_H_
#define SMP_TF_OPS_CC_TRANSPORT_SHA256_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace smp {

using Digest = std::array<uint8_t, 32>;

Digest Sha256(std::string_view message);
Digest HmacSha256(std::string_view key, std::string_view message);

// Compares without leaving early, so that time tells nothing about the content.
bool SameDigest(const Digest& a, const Digest& b);

inline std::string_view AsText(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_SHA256_H_
