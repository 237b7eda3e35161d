// The memory of messages is put into huge pages once, with what is in it, by a thread of its own.
#include "transport/huge_pages.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "check.h"

namespace {

constexpr size_t kRegion = 2 << 20;
constexpr size_t kPage = 4 << 10;

char Byte(size_t i) { return static_cast<char>(i * 2654435761U >> 24); }

// Regions of 2 MiB in small pages, as an allocator of a program that runs has them.
class Memory {
 public:
  explicit Memory(size_t regions) : bytes_(regions * kRegion) {
    whole_ =
        mmap(nullptr, bytes_ + kRegion, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(whole_ != MAP_FAILED);
    const auto start = reinterpret_cast<uintptr_t>(whole_);
    data_ = reinterpret_cast<char*>((start + kRegion - 1) & ~(kRegion - 1));
    madvise(data_, bytes_, MADV_NOHUGEPAGE);
  }
  ~Memory() { munmap(whole_, bytes_ + kRegion); }
  char* at(size_t region) { return data_ + region * kRegion; }
  // Writes pages from where nothing was written before.
  void Fill(size_t bytes) {
    for (size_t i = filled_; i < bytes; ++i) data_[i] = Byte(i);
    filled_ = bytes;
    // Otherwise it is forbidden to put them together.
    madvise(data_, bytes_, MADV_HUGEPAGE);
  }
  bool IsWhole() const {
    for (size_t i = 0; i < filled_; ++i) {
      if (data_[i] != Byte(i)) return false;
    }
    return true;
  }

 private:
  const size_t bytes_;
  size_t filled_ = 0;
  void* whole_;
  char* data_;
};

// Whether the kernel does what is asked for: from Linux 6.1 on, where it has huge pages and memory
// for one.
bool CanCollapse() {
  Memory memory(1);
  memory.Fill(kRegion);
  return smp::HasHugePages() && madvise(memory.at(0), kRegion, 25) == 0;
}

// Waits until so many regions were put together.
bool Becomes(const smp::HugePages& pages, uint64_t regions) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (pages.regions() < regions && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  return pages.regions() == regions;
}

void TestRegionsOfMessages() {
  Memory memory(7);
  memory.Fill(7 * kRegion);
  smp::HugePages pages(true);
  // Too small to ask for.
  pages.OnMessage(memory.at(5), 100 << 10);
  // In the regions 0 and 1, all of 3, and a part of 3 again: the regions 2, 4 and 5 have none.
  pages.OnMessage(memory.at(1) - (200 << 10), 400 << 10);
  pages.OnMessage(memory.at(3), kRegion);
  pages.OnMessage(memory.at(3) + 100, 1 << 20);
  pages.OnMessage(memory.at(6), kRegion);
  CHECK(Becomes(pages, 4));
  CHECK(memory.IsWhole());
}

void TestWhatIsNotInUseStaysAsItIs() {
  Memory memory(3);
  memory.Fill(kRegion / 2);
  smp::HugePages pages(true);
  // The heap has grown so far when the first messages come.
  pages.OnMessage(memory.at(0), kRegion / 2);
  pages.OnMessage(memory.at(2), kRegion);
  memory.Fill(3 * kRegion);
  // A hole makes two mappings of one.
  CHECK(munmap(memory.at(1) + kPage, kPage) == 0);
  pages.OnMessage(memory.at(1), kRegion);
  // It is looked at again with the second message, the fourth, and so on.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (pages.regions() < 2 && std::chrono::steady_clock::now() < deadline) {
    pages.OnMessage(memory.at(0), kRegion);
    pages.OnMessage(memory.at(1), kRegion);
    pages.OnMessage(memory.at(2), kRegion);
  }
  CHECK(pages.regions() == 2);
}

// It would be there twice.
void TestWhatAChildHasTooStaysAsItIs() {
  Memory memory(2);
  memory.Fill(kRegion);
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pause();
    _exit(0);
  }
  memory.Fill(2 * kRegion);
  smp::HugePages pages(true);
  pages.OnMessage(memory.at(0), 2 * kRegion);
  CHECK(Becomes(pages, 1));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

void TestNothingWhereItIsNotWanted() {
  Memory memory(2);
  memory.Fill(2 * kRegion);
  smp::HugePages pages(false);
  pages.OnMessage(memory.at(0), 2 * kRegion);
  CHECK(pages.regions() == 0);
}

// It ends with what is left to do; what is there, is not there, or is no memory is all the same.
void TestEnd() {
  Memory memory(20);
  memory.Fill(20 * kRegion);
  for (int i = 0; i < 3; ++i) {
    smp::HugePages pages(true);
    pages.BeforeWrite(memory.at(0), 20 * kRegion);
    pages.OnMessage(memory.at(0), 20 * kRegion);
    pages.OnMessage(nullptr, kRegion);
    pages.OnMessage(reinterpret_cast<void*>(~uintptr_t{0} - kRegion), kRegion);
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
  TestWhatIsNotInUseStaysAsItIs();
  TestWhatAChildHasTooStaysAsItIs();
  std::puts("huge_pages_test: ok");
  return 0;
}
