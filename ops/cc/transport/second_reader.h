// A second thread that copies large tensors from another process, where a core has nothing to do.
//
//   the thread that has       |chunk 0|chunk 1|chunk 3|chunk 5|
//   taken the message    wakes ┐
//   the second reader          └ ─ ─ ─|chunk 2|chunk 4|
//
// One core copies half as fast as memory allows, and while a rank waits for a tensor others of the
// host may have nothing to do either. Where all cores are busy nothing is shared: the work is the
// same, and a thread that waits for a core would hold the tensor up.
#ifndef SMP_TF_OPS_CC_TRANSPORT_SECOND_READER_H_
#define SMP_TF_OPS_CC_TRANSPORT_SECOND_READER_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace smp {

// Whether the host has a core on which nothing runs, as far as the system says so.
bool HasIdleCore();

class SecondReader {
 public:
  // `has_idle_core` is asked before a large copy, and a few times during it.
  explicit SecondReader(std::function<bool()> has_idle_core = HasIdleCore);
  ~SecondReader();
  SecondReader(const SecondReader&) = delete;
  SecondReader& operator=(const SecondReader&) = delete;

  // Copies as ReadPeerMemory does, and returns what it does. Any thread may call it at any time;
  // the second reader helps one at a time.
  int Read(int32_t pid, uint64_t address, void* to, size_t bytes);

  // Chunks that it has copied.
  uint64_t chunks() const { return chunks_; }

 private:
  enum class State { kIdle, kAsked, kReading };
  void Run();
  // Wakes the second reader, on another core than this thread's. Returns whether there is one.
  bool Ask();
  // Copies the next chunk. Returns whether there was one, and it could be read.
  bool ReadChunk();

  const std::function<bool()> has_idle_core_;
  std::mutex turn_;  // of the thread that is helped

  // What is copied, written while the state is kIdle.
  int32_t pid_ = 0;
  uint64_t address_ = 0;
  char* to_ = nullptr;
  size_t bytes_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<int> error_{0};
  std::atomic<uint64_t> chunks_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<State> state_{State::kIdle};  // changed with the mutex held
  bool stopping_ = false;
  std::thread thread_;  // from the first time that it is asked
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_SECOND_READER_H_
