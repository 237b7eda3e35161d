// Messages between two processes with no TensorFlow near: what a hand-over is measured against.
//
//   bare_transfer          reads "WAY BYTES COUNT GAP_US" lines, answers each with a line of JSON:
//                          {"forward": [ns, ...], "back": [ns, ...]}
//
//   polling     UCX alone, opened and driven through the transport's own UcxWorker, so with the
//               same lanes, error handling and protocols; both processes poll without a pause
//   sleeping    the same, asleep between messages, as a process is that has nothing to do
//   transport   the transport's C interface: keys, codes, its progress thread
//
// Each exchange is a message to the second process and one back, one way each by the clock that
// the processes of a host share. The sender writes the whole buffer anew beforehand and waits for
// GAP_US, so that both sides are at rest.
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <iostream>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "transport/smp_transport.h"
#include "transport/ucx_worker.h"

namespace {

using Clock = std::chrono::steady_clock;

const char kSecret[] = "0123456789abcdef0123456789abcdef";

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

// One end of a pair of sockets, over which the two processes agree.
struct Line {
  int fd;
  void Put(const void* data, size_t bytes) const {
    CHECK(write(fd, data, bytes) == static_cast<ssize_t>(bytes));
  }
  // False when the other end is closed.
  bool Take(void* data, size_t bytes) const {
    size_t at = 0;
    while (at < bytes) {
      const ssize_t got = read(fd, static_cast<char*>(data) + at, bytes - at);
      if (got == 0) return false;
      CHECK(got > 0);
      at += static_cast<size_t>(got);
    }
    return true;
  }
  void PutText(const std::string& text) const {
    const uint64_t size = text.size();
    Put(&size, sizeof(size));
    Put(text.data(), size);
  }
  std::string TakeText() const {
    uint64_t size = 0;
    CHECK(Take(&size, sizeof(size)));
    std::string text(size, '\0');
    CHECK(Take(&text[0], size));
    return text;
  }
};

enum class Way : int { kPolling, kSleeping, kTransport };

struct Turn {
  Way way;
  uint64_t bytes;
  uint64_t count;
  uint64_t gap_us;
};

// When a process had its message ready, and when that of the other was there, for each exchange.
struct Stamps {
  std::vector<int64_t> ready, there;
};

void Pause(uint64_t us) { usleep(static_cast<useconds_t>(us)); }

// UCX, and nothing else.
class Bare : public smp::UcxEvents {
 public:
  Bare(uint32_t rank, const Line& line) : peer_(1 - rank), worker_(2, smp::UcxOptions(), this) {
    line.PutText(worker_.address());
    worker_.Connect(peer_, line.TakeText(), false);
  }

  Stamps Run(uint32_t rank, const Turn& turn) {
    sleeping_ = turn.way == Way::kSleeping;
    in_.assign(turn.bytes, 0);
    out_.assign(turn.bytes, 0);
    Stamps stamps;
    for (uint64_t i = 0; i < turn.count; ++i) {
      if (rank == 0) {
        std::memset(out_.data(), static_cast<int>(i + 1), out_.size());
        Rest(turn.gap_us);
        stamps.ready.push_back(Now());
        Send(out_);
        Until(&arrived_);
        stamps.there.push_back(Now());
      } else {
        Until(&arrived_);
        stamps.there.push_back(Now());
        stamps.ready.push_back(Now());
        Send(in_);
      }
      Until(&sent_);
      CHECK(in_.empty() || (in_[0] == static_cast<char>(i + 1) && in_.back() == in_[0]));
    }
    return stamps;
  }

  bool OnMessage(const void*, size_t, void* data, size_t bytes, bool rendezvous) override {
    CHECK(bytes == in_.size());
    if (!rendezvous) {
      std::memcpy(in_.data(), data, bytes);
      arrived_ = true;
      return false;
    }
    const ucs_status_t status = worker_.FetchRendezvous(data, in_.data(), bytes, kArrives);
    if (status != UCS_INPROGRESS) OnComplete(kArrives, status);
    return true;
  }
  void OnPeerError(uint32_t, const std::string& reason) override {
    std::fprintf(stderr, "the other process was lost: %s\n", reason.c_str());
    _exit(1);
  }
  void OnComplete(uint64_t operation, ucs_status_t status) override {
    CHECK(status == UCS_OK);
    (operation == kArrives ? arrived_ : sent_) = true;
  }

 private:
  static constexpr uint64_t kArrives = 1, kIsSent = 2;

  void Send(const std::vector<char>& buffer) {
    const ucs_status_t status =
        worker_.Send(peer_, "a header", buffer.data(), buffer.size(), false, kIsSent);
    if (status != UCS_INPROGRESS) OnComplete(kIsSent, status);
  }

  void Until(bool* reached) {
    while (!*reached) {
      if (worker_.Progress() || !sleeping_ || !worker_.Arm()) continue;
      pollfd event{worker_.event_fd(), POLLIN, 0};
      poll(&event, 1, -1);
    }
    *reached = false;
  }

  void Rest(uint64_t us) {
    if (sleeping_) return Pause(us);
    const auto end = Clock::now() + std::chrono::microseconds(us);
    while (Clock::now() < end) worker_.Progress();
  }

  const uint32_t peer_;
  smp::UcxWorker worker_;
  bool sleeping_ = false;
  bool arrived_ = false;
  bool sent_ = false;
  std::vector<char> in_, out_;
};

// The transport, from its C interface up. Stamps are taken in its callbacks, and the second process
// answers in them.
class Whole {
 public:
  Whole(uint32_t rank, const Line& line) : rank_(rank) {
    smp_options options;
    smp_options_init(&options);
    options.local_size = 2;
    options.end_process = 0;
    options.watch_signals = 0;
    options.watch_launcher = 0;
    char error[1024] = "";
    transport_ = smp_transport_create(rank, 2, &options, error, sizeof(error));
    if (transport_ == nullptr) std::fprintf(stderr, "%s\n", error);
    CHECK(transport_ != nullptr);
    size_t bytes = 0;
    const void* address = smp_transport_address(transport_, &bytes);
    const std::string mine(static_cast<const char*>(address), bytes);
    line.PutText(mine);
    const std::string theirs = line.TakeText();
    const std::string& first = rank == 0 ? mine : theirs;
    const std::string& second = rank == 0 ? theirs : mine;
    const void* data[] = {first.data(), second.data()};
    const size_t sizes[] = {first.size(), second.size()};
    CHECK(smp_transport_connect(transport_, data, sizes, 2, kSecret, sizeof(kSecret) - 1, error,
                                sizeof(error)) == SMP_OK);
    CHECK(smp_transport_wait_connected(transport_, 20, error, sizeof(error)) == SMP_OK);
  }

  ~Whole() {
    smp_transport_goodbye(transport_, 5);
    smp_transport_destroy(transport_);
  }

  Stamps Run(const Turn& turn) {
    in_.assign(turn.bytes, 0);
    out_.assign(turn.bytes, 0);
    stamps_ = {};
    ++step_;
    for (uint64_t i = 0; i < turn.count; ++i) {
      number_ = i;
      left_ = 2;
      Receive();
      if (rank_ == 0) {
        std::memset(out_.data(), static_cast<int>(i + 1), out_.size());
        Pause(turn.gap_us);
        stamps_.ready.push_back(Now());
        Send(out_);
      }
      std::unique_lock<std::mutex> lock(mutex_);
      CHECK(changed_.wait_for(lock, std::chrono::seconds(60), [this] { return left_ == 0; }));
      CHECK(in_.empty() || (in_[0] == static_cast<char>(i + 1) && in_.back() == in_[0]));
    }
    return stamps_;
  }

 private:
  smp_key Key(uint32_t source) const { return {1, step_, source, number_}; }

  void Send(const std::vector<char>& buffer) {
    const int64_t dims[] = {static_cast<int64_t>(buffer.size())};
    smp_send_params params{};
    params.id = smp_transport_new_id(transport_);
    params.destination = 1 - rank_;
    params.key = Key(rank_);
    params.ndim = 1;
    params.dims = dims;
    params.label = "bare";
    params.buffer = {const_cast<char*>(buffer.data()), buffer.size(), SMP_MEMORY_HOST, nullptr};
    params.done = [](void*, int code, const char*) { CHECK(code == SMP_OK); };
    params.release = &Whole::Release;
    params.arg = this;
    smp_transport_send(transport_, &params);
  }

  void Receive() {
    smp_recv_params params{};
    params.id = smp_transport_new_id(transport_);
    params.source = 1 - rank_;
    params.key = Key(1 - rank_);
    params.label = "bare";
    params.allocate = [](void* arg, const smp_message_info*, smp_buffer* buffer, char*, size_t) {
      auto* self = static_cast<Whole*>(arg);
      buffer->data = self->in_.data();
      buffer->bytes = self->in_.size();
      return static_cast<int>(SMP_OK);
    };
    params.done = [](void* arg, int code, const char*) {
      CHECK(code == SMP_OK);
      auto* self = static_cast<Whole*>(arg);
      self->stamps_.there.push_back(Now());
      if (self->rank_ == 0) return;
      self->stamps_.ready.push_back(Now());
      self->Send(self->in_);
    };
    params.release = &Whole::Release;
    params.arg = this;
    smp_transport_recv(transport_, &params);
  }

  static void Release(void* arg) {
    auto* self = static_cast<Whole*>(arg);
    std::lock_guard<std::mutex> lock(self->mutex_);
    if (--self->left_ == 0) self->changed_.notify_all();
  }

  const uint32_t rank_;
  smp_transport* transport_ = nullptr;
  std::vector<char> in_, out_;
  Stamps stamps_;
  int64_t step_ = 0;
  uint64_t number_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  int left_ = 0;
};

struct Process {
  uint32_t rank;
  Line line;
  Bare bare;
  Whole whole;

  Process(uint32_t rank, const Line& line)
      : rank(rank), line(line), bare(rank, line), whole(rank, line) {}

  Stamps Run(const Turn& turn) {
    return turn.way == Way::kTransport ? whole.Run(turn) : bare.Run(rank, turn);
  }
};

std::string Differences(const std::vector<int64_t>& later, const int64_t* earlier) {
  std::string text;
  for (size_t i = 0; i < later.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(later[i] - earlier[i]);
  }
  return "[" + text + "]";
}

void RunFirst(const Line& line) {
  Process process(0, line);
  std::string way;
  Turn turn{};
  while (std::cin >> way >> turn.bytes >> turn.count >> turn.gap_us) {
    CHECK(way == "polling" || way == "sleeping" || way == "transport");
    turn.way = way == "polling"    ? Way::kPolling
               : way == "sleeping" ? Way::kSleeping
                                   : Way::kTransport;
    line.Put(&turn, sizeof(turn));
    const Stamps mine = process.Run(turn);
    Stamps theirs{std::vector<int64_t>(turn.count), std::vector<int64_t>(turn.count)};
    CHECK(line.Take(theirs.ready.data(), turn.count * sizeof(int64_t)));
    CHECK(line.Take(theirs.there.data(), turn.count * sizeof(int64_t)));
    std::cout << "{\"forward\": " << Differences(theirs.there, mine.ready.data())
              << ", \"back\": " << Differences(mine.there, theirs.ready.data()) << "}" << std::endl;
  }
  // The other process ends when it reads that nothing more comes.
  shutdown(line.fd, SHUT_WR);
  wait(nullptr);
}

void RunSecond(const Line& line) {
  Process process(1, line);
  Turn turn;
  while (line.Take(&turn, sizeof(turn))) {
    const Stamps mine = process.Run(turn);
    line.Put(mine.ready.data(), turn.count * sizeof(int64_t));
    line.Put(mine.there.data(), turn.count * sizeof(int64_t));
  }
}

}  // namespace

int main() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  const pid_t pid = fork();
  CHECK(pid >= 0);
  close(ends[pid == 0 ? 0 : 1]);
  if (pid == 0) {
    RunSecond({ends[1]});
  } else {
    RunFirst({ends[0]});
  }
  return 0;
}
