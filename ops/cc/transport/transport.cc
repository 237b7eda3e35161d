#include "transport/transport.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "transport/own_thread.h"

namespace smp {
namespace {

constexpr uint64_t kWakeToken = ~uint64_t{0};
constexpr uint64_t kUcxToken = kWakeToken - 1;  // smaller tokens are ranks

// While operations wait, the stall watch looks after them this often.
constexpr auto kCheckInterval = std::chrono::milliseconds(500);

// Some years: a time that may be added to the clock.
constexpr double kLongestWait = 1e8;

// Rounds of progress after which the lock is offered to others.
constexpr int kRoundsPerStep = 64;

int UsableCores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace

Transport::Transport(uint32_t rank, uint32_t size, const smp_options& options)
    : rank_(rank),
      size_(size),
      options_(options),
      local_(MakeLocalAddress(rank, size)),
      huge_pages_(options.huge_pages != 0) {
  may_spin_ = options.spin_us > 0 || (options.spin_us < 0 && UsableCores() > options.local_size);
  spin_ = std::chrono::microseconds(options.spin_us < 0 ? 20 : options.spin_us);
  peers_.resize(size);
  UcxOptions ucx;
  ucx.single_host = options.single_host != 0;
  if (options.network_devices != nullptr) ucx.network_devices = options.network_devices;
  worker_ = std::make_unique<UcxWorker>(size, ucx, this);
  local_.worker = worker_->address();
  local_.nonce_at = reinterpret_cast<uint64_t>(local_.nonce.data());
  std::memcpy(&offer_salt_, local_.nonce.data() + 8, sizeof(offer_salt_));
  encoded_address_ = local_.Encode();

  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_fd_ < 0) {
    throw std::runtime_error(std::string("opening event descriptors failed: ") +
                             std::strerror(errno));
  }
  own_descriptors_.emplace(epoll_);
  Watch(wake_fd_, kWakeToken);
  Watch(worker_->event_fd(), kUcxToken);

  GuardianOptions guard;
  guard.watch_launcher = options.watch_launcher != 0;
  guard.watch_signals = options.watch_signals != 0;
  guard.end_process = options.end_process != 0;
  guard.grace_s = options.grace_s;
  {
    // It may have something to tell at once, as of a launcher that is gone: that waits until it is
    // here, since whoever tells a cause takes this lock first.
    std::lock_guard<std::mutex> lock(cause_mutex_);
    guardian_ = std::make_unique<Guardian>(
        guard, [this](const std::string& kind, const std::string& what, int exit_code) {
          FailHere(kind, what, exit_code);
        });
  }

  last_moved_ = next_check_ = Clock::now();
  thread_ = StartOwnThread("smp_progress", [this] { Run(); });
}

Transport::~Transport() {
  Shutdown();
  own_descriptors_.reset();
  for (PeerState& peer : peers_) {
    if (peer.pidfd >= 0) close(peer.pidfd);
  }
  if (epoll_ >= 0) close(epoll_);
  if (wake_fd_ >= 0) close(wake_fd_);
}

bool Transport::Shutdown() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (shut_down_) return true;
    shut_down_ = true;
    RunSubmissions();
    EndAll(SMP_CANCELLED, "the transport of rank " + std::to_string(rank_) + " was shut down");
    DropCopies();
    RefuseArrived();
    changed_.notify_all();
    RunEndings(&lock);
  }
  guardian_->Stop();
  stopping_ = true;
  Wake();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
                         std::min(options_.stall_timeout_s, kLongestWait)));
  const bool all_ended =
      changed_.wait_until(lock, deadline, [this] { return thread_ended_ && copying_ == 0; });
  if (!all_ended) {
    thread_.detach();
    Close();
    RunSubmissions();
    RunEndings(&lock);
    guardian_->Say(RankInWords(local_) +
                   " leaves its transport open: a thread of it has not come back from what it "
                   "called, an end of an operation or a copy, within stall_timeout.");
    return false;
  }
  lock.unlock();
  // waits without a deadline: the thread has ended.
  thread_.join();
  Close();
  lock.lock();
  RunSubmissions();
  RefuseArrived();
  if (readers_allowed_) DisallowReaders();
  worker_.reset();
  // UCX is gone: nobody touches a buffer any more.
  std::vector<Operation*> left;
  for (const auto& [id, op] : operations_) left.push_back(op.get());
  for (Operation* op : left) {
    op->guard = 0;
    op->in_use = false;
    Release(op);
  }
  RunEndings(&lock);
  return true;
}

void Transport::Watch(int fd, uint64_t token) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = token;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
}

void Transport::Wake() {
  if (wake_pending_.exchange(true)) return;
  const uint64_t one = 1;
  if (write(wake_fd_, &one, sizeof(one)) < 0) {
    // The counter is full: the thread is awake.
  }
}

bool Transport::Queue(Submission* submission) {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  if (closed_) return false;
  queue_.push_back(std::move(*submission));
  return true;
}

bool Transport::Enqueue(Task task) {
  Submission submission{nullptr, std::move(task)};
  if (!Queue(&submission)) return false;
  Wake();
  return true;
}

// What was queued before has somebody who takes it, and what is not is ended by who brings it.
void Transport::Close() {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  closed_ = true;
}

void Transport::EndUnstarted(const Operation& op) const {
  const std::string message = Describe(op) + kTooLate;
  if (op.done != nullptr) op.done(op.arg, SMP_FAILED_PRECONDITION, message.c_str());
  if (op.release != nullptr) op.release(op.arg);
}

void Transport::Submit(Submission submission) {
  if (!Queue(&submission)) return EndUnstarted(*submission.operation);
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    Wake();
    return;
  }
  RunSubmissions();
  while (RunCopy(&lock)) RunEndings(&lock);
  const bool needs_progress = std::exchange(needs_progress_, false);
  RunEndings(&lock);
  lock.unlock();
  if (needs_progress) Wake();
}

bool Transport::RunSubmissions() {
  std::vector<Submission> taken;
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    taken.swap(queue_);
  }
  for (Submission& submission : taken) {
    if (submission.operation) {
      Start(std::move(submission.operation));
    } else {
      submission.task();
    }
  }
  return !taken.empty();
}

// Endings run without the lock: what they call may come back with the next operation. Where the
// buffer was in use when the operation ended, another thread may see it come free meanwhile: the
// release waits here for the done that this thread still has to call.
bool Transport::RunEndings(std::unique_lock<std::mutex>* lock) {
  if (endings_.empty()) return false;
  while (!endings_.empty()) {
    std::vector<Ending> endings;
    endings.swap(endings_);
    lock->unlock();
    for (const Ending& ending : endings) {
      if (ending.done != nullptr) ending.done(ending.arg, ending.code, ending.message.c_str());
      if (ending.release != nullptr) ending.release(ending.arg);
    }
    lock->lock();
    for (const Ending& ending : endings) {
      if (ending.kept == 0) continue;
      Operation* op = operations_.at(ending.kept).get();
      op->done_due = false;
      Release(op);
    }
  }
  return true;
}

// Lets an ended operation go, once its done was called and nobody has a hand on its buffer.
void Transport::Release(Operation* op) {
  if (op->done_due || op->in_use) return;
  if (op->release != nullptr) endings_.push_back({nullptr, op->release, op->arg, SMP_OK, "", 0});
  operations_.erase(op->id);
}

bool Transport::Step(std::unique_lock<std::mutex>* lock) {
  wake_pending_ = false;
  bool moved = RunSubmissions();
  bool quiet = false;
  for (int i = 0; i < kRoundsPerStep && !quiet; ++i) {
    quiet = !worker_->Progress();
    if (!quiet) moved = true;
  }
  // What a peer said before it went counts: nothing of it may be left unread.
  if (quiet && gone_pending_) HandleGonePeers();
  const auto now = Clock::now();
  if (now >= next_check_ && !operations_.empty()) {
    CheckStalls();
    SettleTakenBack();
    next_check_ = now + kCheckInterval;
  }
  while (RunCopy(lock)) {
    RunEndings(lock);
    moved = true;
  }
  if (RunEndings(lock)) moved = true;
  if (moved) last_moved_ = Clock::now();
  return moved;
}

void Transport::Run() {
  while (!stopping_) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      ++rounds_;
      if (Step(&lock)) continue;
      if (may_spin_ && Clock::now() - last_moved_ < spin_) {
        lock.unlock();
        sched_yield();
        continue;
      }
      if (!worker_->Arm()) continue;
    }
    Sleep();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  thread_ended_ = true;
  changed_.notify_all();
}

void Transport::Sleep() {
  bool waiting;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    waiting = !operations_.empty();
  }
  {
    std::lock_guard<std::mutex> lock(queue_mutex_);
    if (!queue_.empty()) return;
  }
  epoll_event events[32];
  const int timeout_ms =
      waiting ? static_cast<int>(
                    std::chrono::duration_cast<std::chrono::milliseconds>(kCheckInterval).count())
              : -1;
  // waits without a deadline: only while no operation waits; whoever has something to do wakes it.
  const int count = epoll_wait(epoll_, events, 32, timeout_ms);
  for (int i = 0; i < count; ++i) {
    const uint64_t token = events[i].data.u64;
    if (token == kWakeToken) {
      uint64_t value;
      if (read(wake_fd_, &value, sizeof(value)) < 0) {
        // Somebody else's wake-up was read already.
      }
    } else if (token != kUcxToken) {
      std::unique_lock<std::mutex> lock(mutex_);
      OnPeerExit(static_cast<uint32_t>(token));
    }
  }
}

}  // namespace smp
