#include "transport/pair_codes.h"

#include <cstring>

namespace smp {
namespace {

std::string Pair(const char* purpose, const Address& from, const Address& to) {
  std::string text = std::string("smp_tf 1 ") + purpose + " " + std::to_string(from.rank) + ">" +
                     std::to_string(to.rank) + " ";
  for (const Address* address : {&from, &to}) {
    text.append(AsText(Sha256(address->Encode())));
    text.append(reinterpret_cast<const char*>(address->nonce.data()), address->nonce.size());
  }
  return text;
}

}  // namespace

Digest ProofOf(const std::string& secret, const Address& from, const Address& to) {
  return HmacSha256(secret, Pair("proof", from, to));
}

SipKey KeyOf(const std::string& secret, const Address& from, const Address& to) {
  const Digest digest = HmacSha256(secret, Pair("key", from, to));
  SipKey key;
  std::memcpy(&key.low, digest.data(), 8);
  std::memcpy(&key.high, digest.data() + 8, 8);
  return key;
}

}  // namespace smp
