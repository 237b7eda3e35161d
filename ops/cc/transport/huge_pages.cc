#include "transport/huge_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <string>
#include <system_error>

#include "transport/own_thread.h"

namespace smp {
namespace {

constexpr uintptr_t kRegion = 2 << 20;
constexpr uintptr_t kPage = 4 << 10;
// What is smaller is read in no time.
constexpr size_t kLeastBytes = 256 << 10;
// The C library maps what is larger for itself, and gives it back whole.
constexpr size_t kMapped = 32 << 20;
// Where allocators never come back to the same memory it comes to an end.
constexpr size_t kMostRegions = 1024;
constexpr size_t kMostKnown = 16 * kMostRegions;
// A region of which less is there stays as it is: the rest would be held for nothing.
constexpr size_t kLeastPages = 3 * kRegion / kPage / 4;
// Who has sent a message is read just then, and what is read stays where it is.
constexpr int kMostRefusals = 5;
constexpr auto kRestWhenRefused = std::chrono::milliseconds(20);
// So many regions without room for them in a row: there will be none.
constexpr int kMostWithoutRoom = 8;
// For one part of its time it works, and for so many it rests: the process has other things to do,
// and may not be given memory meanwhile.
constexpr int kRest = 4;
// In <linux/mman.h> from Linux 6.1 on; an older kernel refuses it.
constexpr int kCollapse = 25;

// How many of a region's pages are there, and are this process's alone: what a forked child has,
// too, would be held twice.
size_t OwnPages(uintptr_t region) {
  static const int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  std::array<uint64_t, kRegion / kPage> pages;
  const auto bytes = static_cast<ssize_t>(sizeof(pages));
  const auto at = static_cast<off_t>(region / kPage * sizeof(uint64_t));
  if (file < 0 || pread(file, pages.data(), sizeof(pages), at) != bytes) return 0;
  constexpr uint64_t kOwn = (uint64_t{1} << 63) | (uint64_t{1} << 56);  // present, mapped once
  return std::count_if(pages.begin(), pages.end(), [](uint64_t p) { return (p & kOwn) == kOwn; });
}

std::string FirstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

bool HasHugePages() {
  const std::string said = FirstLine("/sys/kernel/mm/transparent_hugepage/enabled");
  return !said.empty() && said.find("[never]") == std::string::npos &&
         FirstLine("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") ==
             std::to_string(kRegion) &&
         sysconf(_SC_PAGESIZE) == static_cast<long>(kPage);
}

HugePages::HugePages(bool wanted) : wanted_(wanted && HasHugePages()) {}

HugePages::~HugePages() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  // waits without a deadline: the thread is in one call of the kernel's, or idle and woken.
  if (thread_.joinable()) thread_.join();
}

void HugePages::BeforeWrite(void* data, size_t bytes) {
  if (!wanted_ || bytes <= kMapped) return;
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + kRegion - 1) & ~(kRegion - 1);
  const uintptr_t end = (start + bytes) & ~(kRegion - 1);
  madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

void HugePages::OnMessage(const void* data, size_t bytes) {
  if (!wanted_ || bytes < kLeastBytes) return;
  const auto start = reinterpret_cast<uintptr_t>(data);
  std::lock_guard<std::mutex> lock(mutex_);
  if (gave_up_ || stopping_) return;
  const size_t before = asked_.size();
  uintptr_t at = start & ~(kRegion - 1);
  for (size_t left = (start + bytes - 1 - at) / kRegion + 1; left > 0; --left, at += kRegion) {
    if (known_.size() >= kMostKnown && known_.count(at) == 0) continue;
    Region& region = known_[at];
    // Again, but ever more seldom: what was not all there then may be now, and what was given back
    // to the system is in small pages again.
    const uint64_t count = ++region.messages;
    if ((count & (count - 1)) != 0 || region.is_asked) continue;
    if (!region.is_done && regions_ >= kMostRegions) continue;
    region.is_asked = true;
    region.refusals = 0;
    asked_.push_back(at);
  }
  if (asked_.size() == before) return;
  if (!thread_.joinable()) {
    try {
      thread_ = StartOwnThread("smp_pages", [this] { Run(); });
    } catch (const std::system_error&) {
      // The process has as many threads as it may have.
      gave_up_ = true;
      return;
    }
  }
  changed_.notify_all();
}

void HugePages::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  int without_room = 0;
  while (!gave_up_) {
    // waits without a deadline: it has nothing to do; who asks wakes it, and so does the
    // destructor.
    changed_.wait(lock, [this] { return stopping_ || !asked_.empty(); });
    if (stopping_) return;
    const uintptr_t at = asked_.front();
    asked_.pop_front();
    lock.unlock();
    const auto begin = std::chrono::steady_clock::now();
    // Where it is not all of one mapping, such as the heap, the kernel leaves it as it is.
    int error = EINVAL;
    if (OwnPages(at) >= kLeastPages) {
      error = madvise(reinterpret_cast<void*>(at), kRegion, kCollapse) == 0 ? 0 : errno;
    }
    std::chrono::steady_clock::duration rest = kRest * (std::chrono::steady_clock::now() - begin);
    lock.lock();
    Region& region = known_[at];
    region.is_asked = false;
    if (error == 0 && !region.is_done) {
      region.is_done = true;
      ++regions_;
    }
    if ((error == EAGAIN || error == EBUSY) && ++region.refusals < kMostRefusals) {
      region.is_asked = true;
      asked_.push_back(at);
      rest = std::max<std::chrono::steady_clock::duration>(rest, kRestWhenRefused);
    }
    without_room = error == ENOMEM ? without_room + 1 : 0;
    gave_up_ = without_room == kMostWithoutRoom;
    changed_.wait_for(lock, rest, [this] { return stopping_; });
  }
}

}  // namespace smp
