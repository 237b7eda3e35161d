// Reading the memory of another process of this host: one copy, made by the reader.
//
// The kernel asks of a reader what it asks of a debugger: the same user, and what a container's
// profile and Yama (kernel.yama.ptrace_scope) say. Where it is denied, tensors go through shared
// memory, in two copies.
#ifndef SMP_TF_OPS_CC_TRANSPORT_PEER_MEMORY_H_
#define SMP_TF_OPS_CC_TRANSPORT_PEER_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace smp {

// Where a tensor lies in the memory of its sender. Travels as it is: both ends run on one host.
struct Offer {
  uint64_t data;
  uint64_t bytes;
  uint64_t guard;  // of a word that is `value` as long as the tensor is there
  uint64_t value;
  uint64_t operation;  // the sender's
};

// Copies `bytes` from an address in process `pid`. Returns 0 or the errno of what went wrong.
int ReadPeerMemory(int32_t pid, uint64_t address, void* to, size_t bytes);

enum class ReadState {
  kWhole,
  kTakenBack,     // the sender has ended its send
  kProcessEnded,  // the sender's
  kNotReadable,   // the tensor is there, as far as can be known
};

struct ReadResult {
  ReadState state;
  int error;  // of the system, or 0
};

class SecondReader;

// Copies an offered tensor; a large one with the help of `second`, if there is one.
ReadResult ReadOffer(int32_t pid, const Offer& offer, void* to, SecondReader* second = nullptr);

// The nearest process that all of these are or come from; 0 if there is none but init.
int32_t CommonAncestor(const std::vector<int32_t>& pids,
                       const std::function<int32_t(int32_t)>& parent_of);

// Where Yama lets only an ancestor read this process (ptrace_scope 1), allows it to all that come
// from the process that started these: the launcher, as a rule. They may also trace it then. True
// if that was needed and done, until DisallowReaders.
bool AllowReaders(const std::vector<int32_t>& pids);
void DisallowReaders();

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_PEER_MEMORY_H_
