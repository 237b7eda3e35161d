// Reading the memory of a forked child: whole, by two threads, in the middle of memory that is not
// there, of a tensor that was taken back, and of a child that has ended.
#include "transport/peer_memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <thread>
#include <vector>

#include "check.h"
#include "transport/address.h"
#include "transport/second_reader.h"

namespace {

constexpr size_t kBytes = 1 << 20;

// Written by the child alone, behind the fork: what the parent reads is the child's.
struct Memory {
  uint64_t guard = 0;
  std::vector<char> tensor = std::vector<char>(kBytes, 'p');
};

pid_t ForkWith(Memory* memory, uint64_t guard) {
  int ready[2];
  CHECK(pipe(ready) == 0);
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    memory->guard = guard;
    for (char& byte : memory->tensor) byte = 'c';
    CHECK(write(ready[1], "r", 1) == 1);
    for (;;) pause();
  }
  char byte;
  CHECK(read(ready[0], &byte, 1) == 1);
  close(ready[0]);
  close(ready[1]);
  return pid;
}

void End(pid_t pid) {
  kill(pid, SIGKILL);
  CHECK(waitpid(pid, nullptr, 0) == pid);
}

smp::Offer OfferOf(const Memory& memory, uint64_t value) {
  return {reinterpret_cast<uint64_t>(memory.tensor.data()), kBytes,
          reinterpret_cast<uint64_t>(&memory.guard), value, 1};
}

void TestReading() {
  Memory memory;
  const pid_t child = ForkWith(&memory, 77);
  std::vector<char> read(kBytes, '-');
  const auto state_of = [&](uint64_t value) {
    return smp::ReadOffer(child, OfferOf(memory, value), read.data()).state;
  };
  CHECK(state_of(77) == smp::ReadState::kWhole);
  CHECK(read == std::vector<char>(kBytes, 'c'));
  CHECK(memory.tensor == std::vector<char>(kBytes, 'p'));
  // It is no longer what the offer says.
  CHECK(state_of(78) == smp::ReadState::kTakenBack);
  End(child);
  CHECK(state_of(77) == smp::ReadState::kProcessEnded);
}

// Chunks of two threads, of which the second may be asked, refused, too late, or busy with another
// copy: what was read is whole each time.
void TestSecondReader() {
  constexpr size_t kLarge = (5 << 20) + 4321;
  std::vector<char> tensor(kLarge);
  for (size_t i = 0; i < kLarge; ++i) tensor[i] = static_cast<char>(i * 2654435761U >> 24);
  Memory memory;
  const pid_t child = ForkWith(&memory, 77);
  const auto address = reinterpret_cast<uint64_t>(tensor.data());
  std::atomic<bool> is_idle{true};
  smp::SecondReader second([&] { return is_idle.load(); });
  const auto reads_whole = [&] {
    std::vector<char> read(kLarge, '-');
    return second.Read(child, address, read.data(), kLarge) == 0 && read == tensor;
  };
  const bool has_two_cores = std::thread::hardware_concurrency() > 1;
  for (int i = 0; i < 1000 && (i < 20 || (has_two_cores && second.chunks() == 0)); ++i) {
    CHECK(reads_whole());
  }
  CHECK(second.chunks() > 0 || !has_two_cores);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 10; ++j) CHECK(reads_whole());
    });
  }
  for (std::thread& thread : threads) thread.join();
  is_idle = false;
  const uint64_t before = second.chunks();
  for (int i = 0; i < 20; ++i) CHECK(reads_whole());
  CHECK(second.chunks() == before);
  // Whoever has sent a tensor runs when it comes, and sleeps while it is copied.
  std::atomic<int> asked{0};
  smp::SecondReader later([&] { return ++asked % 3 == 0; });
  for (int i = 0; i < 1000 && (i < 20 || (has_two_cores && later.chunks() == 0)); ++i) {
    std::vector<char> read(kLarge, '-');
    CHECK(later.Read(child, address, read.data(), kLarge) == 0 && read == tensor);
  }
  CHECK(later.chunks() > 0 || !has_two_cores);
  CHECK(asked >= 60);
  is_idle = true;
  // Small ones it is not asked for, and of what ends the first error is told.
  std::vector<char> read(kLarge, '-');
  CHECK(second.Read(child, address, read.data(), 100) == 0 && read[99] == tensor[99]);
  CHECK(second.Read(child, 64, read.data(), kLarge) == EFAULT);
  CHECK(reads_whole());
  End(child);
  CHECK(second.Read(child, address, read.data(), kLarge) == ESRCH);
  smp::HasIdleCore();
}

void TestMemoryThatIsNotThere() {
  // The second of two pages is the parent's alone.
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const int access = PROT_READ | PROT_WRITE;
  void* pages = mmap(nullptr, 2 * page, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(pages != MAP_FAILED);
  CHECK(madvise(static_cast<char*>(pages) + page, page, MADV_DONTFORK) == 0);
  Memory memory;
  const pid_t child = ForkWith(&memory, 77);
  std::vector<char> read(2 * page);
  const auto address = reinterpret_cast<uint64_t>(pages);
  CHECK(smp::ReadPeerMemory(child, address, read.data(), page) == 0);
  CHECK(smp::ReadPeerMemory(child, address, read.data(), 2 * page) == EFAULT);
  CHECK(smp::ReadPeerMemory(child, address, read.data(), 0) == 0);
  smp::Offer offer = OfferOf(memory, 77);
  offer.guard = address + page;
  std::vector<char> tensor(kBytes);
  CHECK(smp::ReadOffer(child, offer, tensor.data()).state == smp::ReadState::kTakenBack);
  offer.guard = OfferOf(memory, 77).guard;
  offer.data = address + page;
  const smp::ReadResult result = smp::ReadOffer(child, offer, tensor.data());
  CHECK(result.state == smp::ReadState::kNotReadable && result.error == EFAULT);
  End(child);
}

void TestAncestors() {
  // 1 ── 10 ─┬─ 20 ─┬─ 30
  //          │      └─ 31 ── 40
  //          └─ 21
  // 1 ── 11
  const std::map<int32_t, int32_t> parents = {{10, 1},  {11, 1},  {20, 10}, {21, 10},
                                              {30, 20}, {31, 20}, {40, 31}};
  const auto parent_of = [&](int32_t pid) {
    const auto found = parents.find(pid);
    return found == parents.end() ? 0 : found->second;
  };
  const auto ancestor = [&](const std::vector<int32_t>& pids) {
    return smp::CommonAncestor(pids, parent_of);
  };
  CHECK(ancestor({30, 40}) == 20);
  CHECK(ancestor({30, 40, 21}) == 10);
  CHECK(ancestor({31, 40}) == 31);
  CHECK(ancestor({40}) == 40);
  CHECK(ancestor({30, 11}) == 0);
  CHECK(ancestor({}) == 0);
  CHECK(smp::ParentOfProcess(getpid()) == getppid());
  CHECK(smp::ParentOfProcess(-1) == 0);
}

}  // namespace

int main() {
  alarm(60);
  TestReading();
  TestSecondReader();
  TestMemoryThatIsNotThere();
  TestAncestors();
  std::puts("peer_memory_test: ok");
  return 0;
}
