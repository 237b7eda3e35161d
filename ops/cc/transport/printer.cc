#include "transport/printer.h"

#include <poll.h>
#include <stdio_ext.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "transport/own_thread.h"
#include "transport/plain_text.h"

namespace smp {
namespace {

// Who reads nothing for long need not be told all of it later.
constexpr size_t kMostLines = 256;
// Between two looks whether somebody reads again, where writing does not wait for that.
constexpr int kLookAgainMs = 1000;

// A thread that died with a stream's lock must not keep the process from ending.
void FlushUnlocked() {
  for (FILE* stream : {stdout, stderr}) {
    if (ftrylockfile(stream) == 0) {
      // prints: this is called by the printer's own thread.
      fflush_unlocked(stream);
      funlockfile(stream);
    }
  }
}

}  // namespace

struct Printer::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> waiting;
  bool is_writing = false;
  bool stopping = false;

  void Add(std::function<void()> write) {
    std::lock_guard<std::mutex> lock(mutex);
    if (waiting.size() >= kMostLines) return;
    waiting.push_back(std::move(write));
    changed.notify_all();
  }

  bool IsStopping() {
    std::lock_guard<std::mutex> lock(mutex);
    return stopping;
  }

  void Write(const std::string& line) {
    for (size_t at = 0; at < line.size();) {
      // prints: this thread holds no lock, and nobody waits for it without a deadline.
      const ssize_t written = write(STDERR_FILENO, line.data() + at, line.size() - at);
      if (written > 0) {
        at += static_cast<size_t>(written);
      } else if (written < 0 && errno == EAGAIN) {
        // Somebody made standard error not wait: what does not fit now may later.
        pollfd room{STDERR_FILENO, POLLOUT, 0};
        if (poll(&room, 1, kLookAgainMs) == 0 && IsStopping()) return;
      } else if (written == 0 || errno != EINTR) {
        return;
      }
    }
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      // waits without a deadline: it has nothing to do until it is called, and the destructor does.
      changed.wait(lock, [this] { return stopping || !waiting.empty(); });
      if (waiting.empty()) return;
      const std::function<void()> next = std::move(waiting.front());
      waiting.pop_front();
      is_writing = true;
      lock.unlock();
      next();
      lock.lock();
      is_writing = false;
      changed.notify_all();
    }
  }
};

Printer::Printer() : state_(std::make_shared<State>()) {
  // Whoever it writes to may never read: it is not joined, and keeps what it needs.
  StartOwnThread("smp_printer", [state = state_] { state->Run(); }).detach();
}

Printer::~Printer() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
}

void Printer::Say(const std::string& text) {
  State* const state = state_.get();
  state->Add([state, line = "smp_tf: " + InOneLine(text) + "\n"] { state->Write(line); });
}

void Printer::FlushStreams() { state_->Add(&FlushUnlocked); }

bool Printer::AwaitOut(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return state_->changed.wait_until(
      lock, deadline, [this] { return state_->waiting.empty() && !state_->is_writing; });
}

}  // namespace smp
