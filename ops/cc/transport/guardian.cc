#include "transport/guardian.h"

#include <cxxabi.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>
#include <typeinfo>
#include <vector>

#include "transport/own_thread.h"
#include "transport/printer.h"

namespace smp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSignals[] = {SIGINT, SIGTERM};
// Time Python's own signal handler has before the job is ended.
constexpr auto kSignalHandlerTime = std::chrono::milliseconds(500);
// Time the news of a failure has to reach the other ranks before a signal ends this process.
constexpr auto kTellTime = std::chrono::seconds(1);

// After the grace time: what the streams still hold is written in this time, or lost.
constexpr auto kFlushTime = std::chrono::milliseconds(250);
// The longest that anybody waits for a line to be out. Whoever should read it may never do so.
constexpr auto kPrintTime = std::chrono::seconds(1);

// Time until it is known here why another rank's connections to Horovod ended.
constexpr auto kCauseTime = std::chrono::seconds(3);

std::atomic<std::terminate_handler> previous_terminate{nullptr};
std::atomic<bool> any_failed{false};

// When a rank is gone, Horovod's thread on another may throw an exception of Gloo's that nobody
// catches, before the cause is told. The guardian, which tells it, ends the process then.
void HandleTerminate() {
  const std::type_info* const kind = abi::__cxa_current_exception_type();
  if (kind != nullptr && std::strstr(kind->name(), "gloo") != nullptr) {
    std::this_thread::sleep_for(kCauseTime);
    while (any_failed) std::this_thread::sleep_for(kCauseTime);
  }
  previous_terminate.load()();
}

std::mutex terminate_mutex;
int wait_to_terminate = 0;  // how many Guardians want it

void WaitToTerminate() {
  std::lock_guard<std::mutex> lock(terminate_mutex);
  if (++wait_to_terminate > 1) return;
  const std::terminate_handler previous = std::set_terminate(HandleTerminate);
  if (previous != HandleTerminate) previous_terminate = previous;
}

void TerminateAtOnce() {
  std::lock_guard<std::mutex> lock(terminate_mutex);
  if (--wait_to_terminate > 0) return;
  if (std::get_terminate() == HandleTerminate) std::set_terminate(previous_terminate);
}

std::atomic<pid_t> watching_process{-1};
std::atomic<int> signal_pipe{-1};
std::atomic<int> first_signal{0};
struct sigaction previous_actions[NSIG];

void HandleSignal(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  if (getpid() != watching_process.load()) {
    // A child that the script forked: the pipe leads to its parent, and it ends as it would without
    // us.
    sigaction(number, &previous_actions[number], nullptr);
    raise(number);
    errno = saved;
    return;
  }
  int none = 0;
  first_signal.compare_exchange_strong(none, number);
  const auto byte = static_cast<unsigned char>(number);
  const int fd = signal_pipe.load();
  if (fd >= 0 && write(fd, &byte, 1) < 0) {
    // The pipe is full of earlier signals: the guardian knows already.
  }
  const struct sigaction& previous = previous_actions[number];
  if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(number, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(number);
  }
  errno = saved;
}

Clock::duration Seconds(double seconds) {
  return std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
}

std::string SignalInWords(int number) {
  return number == SIGINT ? "was ended by SIGINT (Ctrl-C)" : "was ended by SIGTERM";
}

bool HasHandler(int number) {
  const struct sigaction& previous = previous_actions[number];
  return (previous.sa_flags & SA_SIGINFO) || previous.sa_handler != SIG_DFL;
}

int OpenPidfd(int pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

std::vector<std::string> CommandLine(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

int ParentOf(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("PPid:", 0) == 0) return std::atoi(line.c_str() + 5);
  }
  return 0;
}

// The launcher's name if this process is one: the program itself, or a script that an interpreter
// runs.
std::string LauncherName(int pid) {
  static const char* const kLaunchers[] = {"horovodrun", "mpirun", "mpiexec",         "orterun",
                                           "prterun",    "srun",   "hydra_pmi_proxy", "slurmstepd"};
  const std::vector<std::string> words = CommandLine(pid);
  for (size_t i = 0; i < std::min<size_t>(words.size(), 4); ++i) {
    const std::string name = words[i].substr(words[i].rfind('/') + 1);
    for (const char* launcher : kLaunchers) {
      if (name == launcher || name == std::string(launcher) + ":") return launcher;
    }
  }
  return "";
}

struct Watched {
  int pidfd;
  std::string words;
};

// Everything between this process and its topmost launcher: each of them lives as long as the job.
// Without a launcher, the direct parent.
std::vector<Watched> WatchLaunchers() {
  std::vector<std::pair<int, std::string>> chain;
  size_t wanted = 1;
  for (int pid = getppid(); pid > 1 && chain.size() < 32; pid = ParentOf(pid)) {
    chain.emplace_back(pid, LauncherName(pid));
    if (!chain.back().second.empty()) wanted = chain.size();
  }
  std::string launcher = "parent process";
  for (size_t i = 0; i < std::min(wanted, chain.size()); ++i) {
    if (!chain[i].second.empty()) launcher = chain[i].second;
  }
  std::vector<Watched> watched;
  for (size_t i = 0; i < std::min(wanted, chain.size()); ++i) {
    const int fd = OpenPidfd(chain[i].first);
    if (fd < 0) continue;
    watched.push_back({fd, "its launcher (" + launcher + ", process " +
                               std::to_string(chain[i].first) + ") ended"});
  }
  return watched;
}

}  // namespace

struct Guardian::State {
  GuardianOptions options;
  std::mutex event_mutex;  // held while on_event runs, so that Stop waits for it
  OnEvent on_event;
  std::mutex mutex;
  std::condition_variable said_changed;
  Printer printer;
  std::atomic<bool> watches_signals{false};
  bool stopping = false;
  bool failed = false;
  bool said = false;
  bool told = false;
  std::string line;
  int exit_code = 1;
  double hold_s = 0;
  Clock::time_point failed_at;
  int wake[2] = {-1, -1};
  int signals[2] = {-1, -1};
  std::thread thread;

  // Owned by the thread.
  std::vector<Watched> launchers;
  int signal_number = 0;
  Clock::time_point signal_deadline;

  ~State() {
    for (int fd : {wake[0], wake[1], signals[0], signals[1]}) {
      if (fd >= 0) close(fd);
    }
    for (const Watched& watched : launchers) close(watched.pidfd);
  }

  void Wake() {
    const char byte = 0;
    if (write(wake[1], &byte, 1) < 0) {
      // Full: it will wake anyway.
    }
  }

  void Tell(const std::string& kind, const std::string& what, int code) {
    std::lock_guard<std::mutex> lock(event_mutex);
    if (on_event) on_event(kind, what, code);
  }

  void OnSignal(int number) {
    if (signal_number != 0) return;
    signal_number = number;
    signal_deadline = Clock::now();
    if (HasHandler(number)) signal_deadline += kSignalHandlerTime;
  }

  // Ends it soon, whatever standard output and standard error do.
  [[noreturn]] void EndProcess() {
    printer.FlushStreams();
    printer.AwaitOut(Clock::now() + kFlushTime);
    if (signal_number != 0 && !HasHandler(signal_number)) {
      struct sigaction action{};
      action.sa_handler = SIG_DFL;
      sigaction(signal_number, &action, nullptr);
      sigset_t set;
      sigemptyset(&set);
      sigaddset(&set, signal_number);
      pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
      kill(getpid(), signal_number);
    }
    _exit(exit_code);
  }

  // Does what is due and returns the milliseconds until something else is; -1 for never.
  int DoWhatIsDue() {
    const auto now = Clock::now();
    std::unique_lock<std::mutex> lock(mutex);
    const auto exit_deadline = failed_at + Seconds(options.grace_s);
    const auto print_deadline = std::min(failed_at + Seconds(hold_s), exit_deadline);
    if (failed && !said && (now >= print_deadline || signal_number != 0 || stopping)) {
      printer.Say(line);
      said = true;
      said_changed.notify_all();
    }
    auto due = Clock::time_point::max();
    if (!failed && signal_number != 0 && !stopping) {
      if (now >= signal_deadline) {
        const int number = signal_number;
        lock.unlock();
        Tell("signal", SignalInWords(number), 128 + number);
        lock.lock();
        if (!failed) return -1;  // stopped meanwhile
        return 0;
      }
      due = signal_deadline;
    } else if (failed && options.end_process) {
      const bool by_signal = signal_number != 0 && !HasHandler(signal_number);
      due = exit_deadline;
      if (by_signal) due = told ? now : std::min(failed_at + kTellTime, exit_deadline);
      if (now >= due) {
        lock.unlock();
        EndProcess();
      }
    }
    if (failed && !said) due = std::min(due, print_deadline);
    if (due == Clock::time_point::max()) return -1;
    return static_cast<int>(
        std::chrono::duration_cast<std::chrono::milliseconds>(due - now).count() + 1);
  }

  void Run() {
    for (;;) {
      const int wait_ms = DoWhatIsDue();
      {
        std::lock_guard<std::mutex> lock(mutex);
        if (stopping && (!failed || (said && !options.end_process))) return;
      }
      std::vector<pollfd> fds = {{wake[0], POLLIN, 0}, {signals[0], POLLIN, 0}};
      for (const Watched& watched : launchers) fds.push_back({watched.pidfd, POLLIN, 0});
      // waits without a deadline: only while there is nothing to do; whoever has something wakes
      // it.
      if (poll(fds.data(), fds.size(), wait_ms) <= 0) continue;
      unsigned char bytes[64];
      if (fds[0].revents != 0 && read(wake[0], bytes, sizeof(bytes)) < 0) {
        // Drained by an earlier round.
      }
      if (fds[1].revents != 0 && read(signals[0], bytes, sizeof(bytes)) > 0) OnSignal(bytes[0]);
      for (size_t i = 2; i < fds.size(); ++i) {
        if (fds[i].revents == 0) continue;
        Tell("launcher", launchers[i - 2].words, 1);
        for (const Watched& watched : launchers) close(watched.pidfd);
        launchers.clear();
        break;
      }
    }
  }
};

Guardian::Guardian(const GuardianOptions& options, OnEvent on_event)
    : state_(std::make_shared<State>()) {
  state_->options = options;
  state_->on_event = std::move(on_event);
  if (pipe2(state_->wake, O_CLOEXEC | O_NONBLOCK) != 0 ||
      pipe2(state_->signals, O_CLOEXEC | O_NONBLOCK) != 0) {
    throw std::runtime_error(std::string("opening a pipe failed: ") + std::strerror(errno));
  }
  if (options.watch_launcher) state_->launchers = WatchLaunchers();
  // The thread keeps the state: after a failure it outlives the transport.
  state_->thread = StartOwnThread("smp_guardian", [state = state_] { state->Run(); });
  if (options.end_process) WaitToTerminate();
  if (options.watch_signals) WatchSignals();
}

Guardian::~Guardian() { Stop(); }

void Guardian::WatchSignals() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->stopping || state_->watches_signals.exchange(true)) return;
  }
  first_signal = 0;
  watching_process = getpid();
  signal_pipe = state_->signals[1];
  for (int number : kSignals) {
    struct sigaction current{};
    sigaction(number, nullptr, &current);
    const bool ignored = !(current.sa_flags & SA_SIGINFO) && current.sa_handler == SIG_IGN;
    const bool ours = (current.sa_flags & SA_SIGINFO) && current.sa_sigaction == &HandleSignal;
    if (ignored || ours) continue;
    previous_actions[number] = current;
    struct sigaction action{};
    action.sa_sigaction = &HandleSignal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | (current.sa_flags & SA_RESTART);
    sigemptyset(&action.sa_mask);
    sigaction(number, &action, nullptr);
  }
}

void Guardian::Failed(const std::string& line, int exit_code) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->failed) return;
  state_->failed = true;
  state_->failed_at = Clock::now();
  state_->line = line;
  state_->exit_code = exit_code;
  any_failed = state_->options.end_process;
  state_->Wake();
}

void Guardian::HoldWords(double seconds) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->hold_s = seconds;
  state_->Wake();
  // Stopped before it failed, it has no thread any more that says it.
  if (seconds > 0 || !state_->failed || state_->stopping) return;
  AwaitWords(&lock);
}

void Guardian::AwaitWords(std::unique_lock<std::mutex>* lock) {
  const auto deadline = Clock::now() + kPrintTime;
  state_->said_changed.wait_until(*lock, deadline, [this] { return state_->said; });
  lock->unlock();
  state_->printer.AwaitOut(deadline);
}

void Guardian::Say(const std::string& text) { state_->printer.Say(text); }

void Guardian::Told() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->told = true;
  state_->Wake();
}

std::string Guardian::PendingSignal(int* exit_code) const {
  const int number = state_->watches_signals ? first_signal.load() : 0;
  *exit_code = 128 + number;
  return number == 0 ? "" : SignalInWords(number);
}

void Guardian::Stop() {
  {
    std::lock_guard<std::mutex> lock(state_->event_mutex);
    state_->on_event = nullptr;
  }
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (state_->stopping) return;
  state_->stopping = true;
  state_->Wake();
  const bool goes_on = state_->failed && state_->options.end_process;
  if (state_->failed) {
    AwaitWords(&lock);
  } else {
    lock.unlock();
    state_->printer.AwaitOut(Clock::now() + kPrintTime);
  }
  if (goes_on) {
    state_->thread.detach();
    return;
  }
  // waits without a deadline: the thread never waits for anybody but with one.
  state_->thread.join();
  if (state_->options.end_process) TerminateAtOnce();
  if (state_->watches_signals) {
    signal_pipe = -1;
    for (int number : kSignals) {
      struct sigaction current{};
      sigaction(number, nullptr, &current);
      if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == &HandleSignal) {
        sigaction(number, &previous_actions[number], nullptr);
      }
    }
    // One that came while this was stopped was to end the process, and does.
    const int number = first_signal.load();
    if (number != 0 && !state_->failed && !HasHandler(number)) kill(getpid(), number);
  }
}

}  // namespace smp
