// The bytes by which peers find and recognise a rank.
#ifndef SMP_TF_OPS_CC_TRANSPORT_ADDRESS_H_
#define SMP_TF_OPS_CC_TRANSPORT_ADDRESS_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "transport/sha256.h"

namespace smp {

struct Address {
  uint32_t rank = 0;
  uint32_t size = 0;
  int32_t pid = 0;
  uint64_t start_time = 0;  // of the process, so that a reused pid is not taken for it
  std::array<uint8_t, 32> nonce{};
  uint64_t nonce_at = 0;  // where it lies in the rank's memory, for who may read that
  Digest host_id{};       // equal on processes that see each other's pids
  std::string hostname;
  std::string worker;  // UCX's own address

  std::string Encode() const;
  static bool Decode(std::string_view bytes, Address* address);
};

// The address of this process, all but `worker`. Throws std::system_error without randomness.
Address MakeLocalAddress(uint32_t rank, uint32_t size);

// Start time of a process in clock ticks since boot; 0 if there is none.
uint64_t ProcessStartTime(int32_t pid);

// The process that another one was started by; 0 if there is none.
int32_t ParentOfProcess(int32_t pid);

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_ADDRESS_H_
