// The memory of messages is put into huge pages once, with what is in it, by a thread of its own.
#include "transport/huge_pages.h"

#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "check.h"

namespace {

constexpr size_t kRegion = 2 << 20;

// Regions of 2 MiB with ordinary pages all over: as an allocator of a program that runs has them.
class Memory {
 public:
  explicit Memory(size_t regions) : bytes_(regions * kRegion) {
    whole_ =
        mmap(nullptr, bytes_ + kRegion, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(whole_ != MAP_FAILED);
    const auto start = reinterpret_cast<uintptr_t>(whole_);
    data_ = reinterpret_cast<char*>((start + kRegion - 1) & ~(kRegion - 1));
    madvise(data_, bytes_, MADV_NOHUGEPAGE);
    for (size_t i = 0; i < bytes_; ++i) data_[i] = Byte(i);
    // As it is where nothing was said of it.
    madvise(data_, bytes_, MADV_HUGEPAGE);
  }
  ~Memory() { munmap(whole_, bytes_ + kRegion); }
  char* data() { return data_; }
  bool IsWhole() const {
    for (size_t i = 0; i < bytes_; ++i) {
      if (data_[i] != Byte(i)) return false;
    }
    return true;
  }

 private:
  static char Byte(size_t i) { return static_cast<char>(i * 2654435761U >> 24); }
  size_t bytes_;
  void* whole_;
  char* data_;
};

// KiB of this process that lie in huge pages.
long HugeKib() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string line;
  long found = 0;
  while (std::getline(file, line)) {
    if (std::sscanf(line.c_str(), "AnonHugePages: %ld", &found) == 1) return found;
  }
  return 0;
}

// Whether the kernel does what is asked for: from Linux 6.1 on, where it has huge pages at all.
bool CanCollapse() {
  Memory memory(1);
  return smp::HasHugePages() && madvise(memory.data(), kRegion, 25) == 0;
}

bool Becomes(const smp::HugePages& pages, uint64_t regions) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (pages.regions() < regions && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  return pages.regions() == regions;
}

void TestRegionsOfMessages() {
  Memory memory(6);
  const long before = HugeKib();
  smp::HugePages pages(true);
  // In the regions 0 and 1, all of 3, and a part of 3 again: the regions 2, 4 and 5 have none.
  pages.OnMessage(memory.data() + kRegion - (200 << 10), 400 << 10);
  pages.OnMessage(memory.data() + 3 * kRegion, kRegion);
  pages.OnMessage(memory.data() + 3 * kRegion + 100, 1 << 20);
  // Too small to ask for.
  pages.OnMessage(memory.data() + 5 * kRegion, 100 << 10);
  CHECK(Becomes(pages, 3));
  CHECK(HugeKib() - before == 3 * 2048);
  CHECK(memory.IsWhole());
}

void TestWhatCannotBePutTogether() {
  Memory memory(2);
  smp::HugePages pages(true);
  // A part of the first region is not there: it stays as it is, and the next one does not wait.
  CHECK(munmap(memory.data() + (1 << 20), 4096) == 0);
  pages.OnMessage(memory.data(), 1 << 20);
  pages.OnMessage(memory.data() + kRegion, kRegion);
  CHECK(Becomes(pages, 1));
}

void TestNothingWhereItIsNotWanted() {
  Memory memory(2);
  const long before = HugeKib();
  {
    smp::HugePages pages(false);
    pages.OnMessage(memory.data(), 2 * kRegion);
    CHECK(pages.regions() == 0);
  }
  CHECK(HugeKib() == before);
}

// It ends with what is left to do.
void TestEnd() {
  Memory memory(8);
  for (int i = 0; i < 3; ++i) {
    smp::HugePages pages(true);
    pages.OnMessage(memory.data(), 8 * kRegion);
  }
  CHECK(memory.IsWhole());
}

}  // namespace

int main() {
  TestNothingWhereItIsNotWanted();
  TestEnd();
  if (!CanCollapse()) {
    std::puts("huge_pages_test: ok (this kernel puts no pages together when it is asked to)");
    return 0;
  }
  TestRegionsOfMessages();
  TestWhatCannotBePutTogether();
  std::puts("huge_pages_test: ok");
  return 0;
}
