#include "transport/second_reader.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <system_error>
#include <utility>

#include "transport/own_thread.h"
#include "transport/peer_memory.h"

namespace smp {
namespace {

// What is smaller one thread has copied by the time another one is awake.
constexpr size_t kLeastBytes = 2 << 20;
// The same, of what is left of a copy that has begun.
constexpr size_t kLeastLeft = 1 << 20;
// Small enough for both to end at about the same time, large enough to cost nothing.
constexpr size_t kChunk = 128 << 10;
// How long the last chunk of the other is waited for without sleeping.
constexpr auto kPatience = std::chrono::microseconds(100);

}  // namespace

bool HasIdleCore() {
  static const int file = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  static const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  char text[128];
  const ssize_t count = file < 0 ? -1 : pread(file, text, sizeof(text) - 1, 0);
  if (count <= 0) return false;
  text[count] = '\0';
  long running = 0;  // this thread among them
  return std::sscanf(text, "%*s %*s %*s %ld/", &running) == 1 && running < cores;
}

SecondReader::SecondReader(std::function<bool()> has_idle_core)
    : has_idle_core_(std::move(has_idle_core)) {}

SecondReader::~SecondReader() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  // waits without a deadline: the thread copies one chunk, or is idle and woken.
  if (thread_.joinable()) thread_.join();
}

int SecondReader::Read(int32_t pid, uint64_t address, void* to, size_t bytes) {
  const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
  if (bytes < kLeastBytes || !turn.owns_lock()) return ReadPeerMemory(pid, address, to, bytes);
  pid_ = pid;
  address_ = address;
  to_ = static_cast<char*>(to);
  bytes_ = bytes;
  error_ = 0;
  next_ = 0;
  bool is_asked = false;
  for (uint64_t count = 0; !is_asked && bytes_ - next_ >= kLeastLeft; ++count) {
    // As a rule whoever has sent it still runs when it comes, and sleeps soon: looked for before
    // the chunks 0, 1, 2, 4, 8 and so on.
    if ((count & (count - 1)) == 0 && has_idle_core_()) {
      if (!Ask()) break;
      is_asked = true;
    } else if (!ReadChunk()) {
      return error_;
    }
  }
  while (ReadChunk()) {
  }
  if (!is_asked) return error_;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (state_ == State::kReading && std::chrono::steady_clock::now() < end) {
  }
  std::unique_lock<std::mutex> lock(mutex_);
  // Whoever is not awake yet is not needed any more.
  if (state_ == State::kAsked) state_ = State::kIdle;
  // waits without a deadline: the other thread copies one chunk, into memory that must stay.
  changed_.wait(lock, [this] { return state_ == State::kIdle; });
  return error_;
}

bool SecondReader::Ask() {
  cpu_set_t others;
  if (pthread_getaffinity_np(pthread_self(), sizeof(others), &others) != 0) return false;
  // The system wakes it on this core, as a rule, and moves it away milliseconds later.
  const int here = sched_getcpu();
  if (here >= 0) CPU_CLR(here, &others);
  if (CPU_COUNT(&others) == 0) return false;
  if (!thread_.joinable()) {
    try {
      thread_ = StartOwnThread("smp_reader", [this] { Run(); });
    } catch (const std::system_error&) {
      // The process has as many threads as it may have.
      return false;
    }
  }
  pthread_setaffinity_np(thread_.native_handle(), sizeof(others), &others);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    state_ = State::kAsked;
  }
  changed_.notify_all();
  return true;
}

bool SecondReader::ReadChunk() {
  size_t at = 0;
  if (error_ != 0 || (at = next_.fetch_add(kChunk)) >= bytes_) return false;
  const int error = ReadPeerMemory(pid_, address_ + at, to_ + at, std::min(kChunk, bytes_ - at));
  if (error != 0) error_ = error;
  return error == 0;
}

void SecondReader::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    // waits without a deadline: it has nothing to do; who asks wakes it, and so does the
    // destructor.
    changed_.wait(lock, [this] { return stopping_ || state_ == State::kAsked; });
    if (stopping_) return;
    state_ = State::kReading;
    lock.unlock();
    while (ReadChunk()) ++chunks_;
    lock.lock();
    state_ = State::kIdle;
    changed_.notify_all();
  }
}

}  // namespace smp
