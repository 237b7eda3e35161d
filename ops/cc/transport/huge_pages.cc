#include "transport/huge_pages.h"

#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <fstream>
#include <string>
#include <system_error>

#include "transport/own_thread.h"

namespace smp {
namespace {

constexpr uintptr_t kRegion = 2 << 20;
// What is smaller is read in no time.
constexpr size_t kLeastBytes = 256 << 10;
// What is larger may have been allocated for this message alone, and has no pages yet.
constexpr size_t kFresh = 4 << 20;
// Each takes milliseconds, so it stops where allocators never come back to the same memory.
constexpr size_t kMostRegions = 1024;
// A region that somebody reads just then stays as it is.
constexpr int kMostTries = 5;
// For one part of its time it works, and for so many it rests: the process has other things to do,
// and may not be given memory meanwhile.
constexpr int kRest = 4;
// In <linux/mman.h> from Linux 6.1 on; an older kernel refuses it.
constexpr int kCollapse = 25;

}  // namespace

bool HasHugePages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string said;
  return std::getline(file, said) && said.find("[never]") == std::string::npos;
}

HugePages::HugePages(bool wanted) : wanted_(wanted && HasHugePages()) {}

HugePages::~HugePages() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void HugePages::OnMessage(const void* data, size_t bytes) {
  if (!wanted_ || bytes < kLeastBytes) return;
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first_whole = (start + kRegion - 1) & ~(kRegion - 1);
  const uintptr_t end_whole = (start + bytes) & ~(kRegion - 1);
  if (bytes >= kFresh && first_whole < end_whole) {
    madvise(reinterpret_cast<void*>(first_whole), end_whole - first_whole, MADV_HUGEPAGE);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (uintptr_t region = start & ~(kRegion - 1); region < start + bytes; region += kRegion) {
    if (tries_.size() >= kMostRegions || !tries_.emplace(region, 0).second) continue;
    asked_.push_back(region);
  }
  if (asked_.empty() || stopping_) return;
  if (!thread_.joinable()) {
    try {
      thread_ = StartOwnThread("smp_pages", [this] { Run(); });
    } catch (const std::system_error&) {
      // The process has as many threads as it may have.
      asked_.clear();
      return;
    }
  }
  changed_.notify_all();
}

void HugePages::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !asked_.empty(); });
    if (stopping_) return;
    const uintptr_t region = asked_.front();
    asked_.pop_front();
    lock.unlock();
    const auto begin = std::chrono::steady_clock::now();
    // Refused where it is not all of one mapping, such as the heap.
    const bool is_one = madvise(reinterpret_cast<void*>(region), kRegion, kCollapse) == 0;
    const int error = is_one ? 0 : errno;
    if (is_one) {
      ++regions_;
      // When it was given back, and is written again, too.
      madvise(reinterpret_cast<void*>(region), kRegion, MADV_HUGEPAGE);
    }
    const auto took = std::chrono::steady_clock::now() - begin;
    lock.lock();
    if (error == EAGAIN || error == EBUSY) {
      int& tries = tries_[region];
      if (++tries < kMostTries) asked_.push_back(region);
    }
    changed_.wait_for(lock, kRest * took, [this] { return stopping_; });
  }
}

}  // namespace smp
