// What travels in front of every message: a fixed header, the dimensions, the sender's label.
//
//   | MessageHead (fixed) | int64 dims[ndim] | char label[label_bytes] |   then the payload
//
// The code (MAC) covers everything in front of the payload, and the payload as well where that is
// sent along with it: of control messages, and of data of up to kEagerBytes. Larger tensors are
// fetched, or read, by who needs them.
#ifndef SMP_TF_OPS_CC_TRANSPORT_MESSAGE_H_
#define SMP_TF_OPS_CC_TRANSPORT_MESSAGE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/siphash.h"

namespace smp {

enum class MessageKind : uint8_t {
  kData = 1,
  kProof = 2,      // payload: proof that the sender knows the job's secret
  kReady = 3,      // the sender has verified the receiver's proof; argument: 1 if it can read
                   // the receiver's memory
  kAbort = 4,      // payload: the cause as JSON; argument: the exit code
  kGoodbye = 5,    // payload: the last step begun of each program
  kAskStatus = 6,  // "what are you doing?"; argument: the question's id, 0 for words
  kStatus = 7,     // payload: the answer, JSON or, to id 0, words; argument: that id
  kOffer = 8,      // payload: an Offer; the tensor stays where it is until kTaken
  kTaken = 9,  // argument: the operation offered; payload: nothing, "send it" where it cannot be
               // read and is to come as kData, or why it is refused
};

// Names one tensor of one microbatch: with the source rank, unique in a job's life.
struct MessageKey {
  uint64_t program = 0;
  int64_t step = 0;
  uint64_t edge = 0;
  uint64_t microbatch = 0;

  bool operator==(const MessageKey& other) const {
    return program == other.program && step == other.step && edge == other.edge &&
           microbatch == other.microbatch;
  }
};

struct MessageHead {
  uint32_t magic;
  MessageKind kind;
  uint8_t version;
  uint8_t ndim;
  uint8_t label_bytes;
  uint32_t source;
  uint32_t destination;
  uint64_t sequence;
  MessageKey key;
  uint64_t bytes;
  int64_t argument;
  int32_t dtype;
  uint32_t reserved;
  uint64_t mac;
};
static_assert(sizeof(MessageHead) == 88, "the header has no padding: all of it is authenticated");

constexpr uint32_t kMagic = 0x504d5301;
constexpr uint8_t kVersion = 3;
constexpr size_t kMaxLabelBytes = 200;
constexpr size_t kMaxControlBytes = 4096;

// A received header whose parts point into the received bytes.
struct MessageView {
  MessageHead head;
  std::vector<int64_t> dims;
  std::string label;
};

// Builds the bytes in front of a payload. `covered` is the payload where the code covers it.
std::string EncodeMessage(MessageHead head, const int64_t* dims, std::string_view label,
                          const SipKey* key, std::string_view covered);

// Takes the bytes apart. False if they are not a message of this version of ours.
bool DecodeMessage(const void* bytes, size_t size, MessageView* view);

// True if the code in the header is the one that `key` gives for it and for the covered payload.
bool VerifyMessage(const void* bytes, size_t size, const SipKey& key, std::string_view covered);

// Remembers which sequence numbers of one sender came, so that a replayed message is refused
// although messages may overtake each other.
class SequenceWindow {
 public:
  SequenceWindow() : seen_(kWindow, false) {}

  // True the first time a number within the window is seen.
  bool Accept(uint64_t sequence);

 private:
  static constexpr uint64_t kWindow = 1 << 16;
  std::vector<bool> seen_;
  uint64_t next_ = 0;  // one past the highest number seen
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_MESSAGE_H_
