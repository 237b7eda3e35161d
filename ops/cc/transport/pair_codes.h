// What one rank proves itself to another with, and the key of its messages' codes.
//
// Both are HMACs of the job's secret over both ranks, both addresses and the nonces in them, so
// that each is good for one direction of one pair of one job.
#ifndef SMP_TF_OPS_CC_TRANSPORT_PAIR_CODES_H_
#define SMP_TF_OPS_CC_TRANSPORT_PAIR_CODES_H_

#include <string>

#include "transport/address.h"
#include "transport/sha256.h"
#include "transport/siphash.h"

namespace smp {

// The proof that `from` gives `to`.
Digest ProofOf(const std::string& secret, const Address& from, const Address& to);

// The key of the codes of the messages that `from` sends to `to`.
SipKey KeyOf(const std::string& secret, const Address& from, const Address& to);

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_PAIR_CODES_H_
