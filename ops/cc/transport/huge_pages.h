// Memory that large messages lie in, moved into huge pages.
//
//   messages    ├──── a ────┤     ├─ b ─┤  ├─────── c ───────┤
//   regions    │  2 MiB  │  2 MiB  │  2 MiB  │  2 MiB  │        each becomes one page
//
// To read another process's memory the kernel looks up every page of it and of the reader's own,
// which takes it longer than to copy them: of 4 KiB each there are 512 times as many as of 2 MiB.
// Allocators mostly use the same memory again for the messages of the next steps, so a thread of
// its own has the kernel put the regions together that messages lie in, one after the other, while
// the process does something else. Only those that are in use as it is: a huge page is there whole.
#ifndef SMP_TF_OPS_CC_TRANSPORT_HUGE_PAGES_H_
#define SMP_TF_OPS_CC_TRANSPORT_HUGE_PAGES_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace smp {

// Whether the system gives huge pages of 2 MiB to who asks for them.
bool HasHugePages();

class HugePages {
 public:
  // Does nothing where it is not `wanted`, or the system has none.
  explicit HugePages(bool wanted);
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  // A message lies here. Any thread may say so at any time; it waits for nobody.
  void OnMessage(const void* data, size_t bytes);
  // A message is about to be written here, perhaps as the first thing ever. May wait for the
  // kernel.
  void BeforeWrite(void* data, size_t bytes);

  // Different regions that the kernel has put together when it was asked to.
  uint64_t regions() const { return regions_; }

 private:
  struct Region {
    uint64_t messages = 0;
    bool is_asked = false;
    bool is_done = false;
    int refusals = 0;
  };
  void Run();

  const bool wanted_;
  std::atomic<uint64_t> regions_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<uintptr_t, Region> known_;  // by address
  std::deque<uintptr_t> asked_;
  bool stopping_ = false;
  bool gave_up_ = false;
  std::thread thread_;  // from the first region on
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_HUGE_PAGES_H_
