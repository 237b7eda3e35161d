// Memory that messages lie in, moved into huge pages.
//
//   messages    ├──── a ────┤     ├─ b ─┤  ├─────── c ───────┤
//   regions    │  2 MiB  │  2 MiB  │  2 MiB  │  2 MiB  │        each becomes one page, once
//
// To read another process's memory the kernel looks up every page of it and of the reader's own,
// which takes it longer than to copy them: of 4 KiB each there are 512 times as many as of 2 MiB.
// Allocators use the same memory again for the messages of the next steps, so a thread of its own
// has the kernel put the regions together that messages lie in, a few at a time, while the process
// does something else. A region that has no page yet gets a huge one when it is first written.
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

// Whether the system gives huge pages to who asks for them.
bool HasHugePages();

class HugePages {
 public:
  // Does nothing where it is not `wanted`, or the system has none.
  explicit HugePages(bool wanted);
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  // A message lies here. Any thread may say so at any time; nothing waits.
  void OnMessage(const void* data, size_t bytes);

  // Regions that were put together.
  uint64_t regions() const { return regions_; }

 private:
  void Run();

  const bool wanted_;
  std::atomic<uint64_t> regions_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<uintptr_t, int> tries_;  // of every region that was asked for
  std::deque<uintptr_t> asked_;
  bool stopping_ = false;
  std::thread thread_;  // from the first region on
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_HUGE_PAGES_H_
