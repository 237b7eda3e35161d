// The C interface between forked processes, once with and once without reading each other's memory:
// many messages in any order, one of more than 2 GiB, an intruder, a stranger who is early, and an
// end that is told before an exception that nobody catches ends the process.
//
//   transport_test [small]
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <functional>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "transport/address.h"
#include "transport/message.h"
#include "transport/pair_codes.h"
#include "transport/smp_transport.h"

namespace gloo {

// As Gloo throws it, in a thread of Horovod's.
struct IoException : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace gloo

namespace {

constexpr uint32_t kSize = 3;
constexpr int kMessages = 3000;
bool is_small = false;  // nothing of gigabytes, and no memory of other processes is read
const char kSecret[] = "0123456789abcdef0123456789abcdef";

// One end of a pair of sockets, over which the processes of a test agree.
struct Line {
  int fd;
  void Put(const std::string& text) const {
    const uint32_t size = static_cast<uint32_t>(text.size());
    CHECK(write(fd, &size, sizeof(size)) == sizeof(size));
    CHECK(write(fd, text.data(), size) == static_cast<ssize_t>(size));
  }
  std::string Take() const {
    uint32_t size = 0;
    CHECK(read(fd, &size, sizeof(size)) == sizeof(size));
    std::string text(size, '\0');
    size_t at = 0;
    while (at < size) {
      const ssize_t got = read(fd, &text[at], size - at);
      CHECK(got > 0);
      at += static_cast<size_t>(got);
    }
    return text;
  }
};

smp_transport* Open(uint32_t rank, bool reads) {
  smp_options options;
  smp_options_init(&options);
  options.local_size = kSize;
  options.end_process = 0;
  options.watch_signals = 0;
  options.read_memory = reads;
  char error[256] = "";
  smp_transport* transport = smp_transport_create(rank, kSize, &options, error, sizeof(error));
  if (transport == nullptr) std::fprintf(stderr, "%s\n", error);
  CHECK(transport != nullptr);
  return transport;
}

std::string AddressOf(smp_transport* transport) {
  size_t bytes = 0;
  const void* data = smp_transport_address(transport, &bytes);
  return {static_cast<const char*>(data), bytes};
}

void Connect(smp_transport* transport, const std::vector<std::string>& addresses) {
  std::vector<const void*> data;
  std::vector<size_t> bytes;
  for (const std::string& address : addresses) {
    data.push_back(address.data());
    bytes.push_back(address.size());
  }
  char error[1024] = "";
  CHECK(smp_transport_connect(transport, data.data(), bytes.data(), data.size(), kSecret,
                              sizeof(kSecret) - 1, error, sizeof(error)) == SMP_OK);
  const int code = smp_transport_wait_connected(transport, 20, error, sizeof(error));
  if (code != SMP_OK) std::fprintf(stderr, "%s\n", error);
  CHECK(code == SMP_OK);
}

struct Countdown {
  std::mutex mutex;
  std::condition_variable changed;
  int left;
  explicit Countdown(int count) : left(count) {}
  void Tick() {
    std::lock_guard<std::mutex> lock(mutex);
    if (--left == 0) changed.notify_all();
  }
  bool Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    return changed.wait_for(lock, std::chrono::seconds(120), [this] { return left == 0; });
  }
};

// Empty, small, and large enough to be fetched by the receiver.
size_t BytesOf(int i) { return i % 7 == 0 ? 0 : i % 11 == 0 ? 50000 : static_cast<size_t>(i); }

struct Call {
  std::vector<char> data;
  int number = 0;
  int code = -1;
  Countdown* countdown = nullptr;
};

int Allocate(void* arg, const smp_message_info* info, smp_buffer* buffer, char*, size_t) {
  auto* call = static_cast<Call*>(arg);
  CHECK(info->ndim == 1 && info->dims[0] == call->number && info->dtype == 9);
  call->data.resize(info->bytes);
  buffer->data = call->data.data();
  buffer->bytes = info->bytes;
  return SMP_OK;
}
void Done(void* arg, int code, const char* message) {
  if (code != SMP_OK) std::fprintf(stderr, "%s\n", message);
  static_cast<Call*>(arg)->code = code;
}
void Release(void* arg) { static_cast<Call*>(arg)->countdown->Tick(); }

// Every rank sends to every rank, itself included, in an order of its own.
void ManyMessages(smp_transport* transport, uint32_t rank) {
  Countdown countdown(2 * kMessages);
  std::vector<Call> sends(kMessages), receives(kMessages);
  std::vector<int> order(2 * kMessages);
  for (int i = 0; i < 2 * kMessages; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(rank));
  for (int item : order) {
    const int i = item % kMessages;
    Call& call = item < kMessages ? sends[i] : receives[i];
    call.number = i;
    call.countdown = &countdown;
    const uint32_t peer = (rank + static_cast<uint32_t>(i)) % kSize;
    // The same i meets on both sides: rank a sends i to a + i, which receives it from a.
    if (item < kMessages) {
      call.data.assign(BytesOf(i), static_cast<char>(i + rank));
      const int64_t dims[] = {i};
      smp_send_params params{};
      params.id = smp_transport_new_id(transport);
      params.destination = peer;
      params.key = {1, i / 100, static_cast<uint64_t>(i) << 40, 0};
      params.dtype = 9;
      params.ndim = 1;
      params.dims = dims;
      params.label = "many";
      params.buffer = {call.data.data(), call.data.size(), SMP_MEMORY_HOST, nullptr};
      params.done = &Done;
      params.release = &Release;
      params.arg = &call;
      smp_transport_send(transport, &params);
    } else {
      smp_recv_params params{};
      params.id = smp_transport_new_id(transport);
      params.source = (rank + kSize * kMessages - static_cast<uint32_t>(i)) % kSize;
      params.key = {1, i / 100, static_cast<uint64_t>(i) << 40, 0};
      params.label = "many";
      params.allocate = &Allocate;
      params.done = &Done;
      params.release = &Release;
      params.arg = &call;
      smp_transport_recv(transport, &params);
    }
  }
  CHECK(countdown.Wait());
  for (int i = 0; i < kMessages; ++i) {
    CHECK(sends[i].code == SMP_OK && receives[i].code == SMP_OK);
    const uint32_t source = (rank + kSize * kMessages - static_cast<uint32_t>(i)) % kSize;
    CHECK(receives[i].data == std::vector<char>(BytesOf(i), static_cast<char>(i + source)));
  }
}

// More bytes than 31 bits count, in little memory: the same pages again and again.
class LargeBuffer {
 public:
  static constexpr size_t kBytes = (size_t{1} << 31) + 4097;

  LargeBuffer() : file_(memfd_create("large", 0)), bytes_((kBytes / kPage + 1) * kPage) {
    CHECK(file_ >= 0 && ftruncate(file_, kPage) == 0);
    void* all = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(all != MAP_FAILED);
    data_ = static_cast<char*>(all);
    for (size_t at = 0; at < bytes_; at += kPage) {
      const int access = PROT_READ | PROT_WRITE;
      CHECK(mmap(data_ + at, kPage, access, MAP_SHARED | MAP_FIXED, file_, 0) == data_ + at);
    }
  }
  ~LargeBuffer() {
    munmap(data_, bytes_);
    close(file_);
  }
  char* data() { return data_; }
  void Fill() {
    for (size_t i = 0; i < kPage; ++i) data_[i] = Value(i);
  }
  bool Filled() const {
    for (size_t i = 0; i < kPage; ++i) {
      if (data_[i] != Value(i)) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kPage = size_t{1} << 21;
  static char Value(size_t i) { return static_cast<char>(i * 2654435761u >> 16); }
  int file_;
  size_t bytes_;
  char* data_;
};

struct LargeCall {
  LargeBuffer buffer;
  int code = -1;
  Countdown countdown{1};
};

int AllocateLarge(void* arg, const smp_message_info* info, smp_buffer* buffer, char*, size_t) {
  CHECK(info->bytes == LargeBuffer::kBytes && info->dims[0] == int64_t{LargeBuffer::kBytes});
  buffer->data = static_cast<LargeCall*>(arg)->buffer.data();
  buffer->bytes = info->bytes;
  return SMP_OK;
}
void LargeDone(void* arg, int code, const char*) { static_cast<LargeCall*>(arg)->code = code; }
void LargeRelease(void* arg) { static_cast<LargeCall*>(arg)->countdown.Tick(); }

// From rank 0 to rank 1.
void MoreThan2GiB(smp_transport* transport, uint32_t rank) {
  if (rank > 1) return;
  LargeCall call;
  const int64_t dims[] = {LargeBuffer::kBytes};
  if (rank == 0) {
    call.buffer.Fill();
    smp_send_params params{};
    params.id = smp_transport_new_id(transport);
    params.destination = 1;
    params.key = {2, 0, 0, 0};
    params.dtype = 9;
    params.ndim = 1;
    params.dims = dims;
    params.label = "large";
    params.buffer = {call.buffer.data(), LargeBuffer::kBytes, SMP_MEMORY_HOST, nullptr};
    params.done = &LargeDone;
    params.release = &LargeRelease;
    params.arg = &call;
    smp_transport_send(transport, &params);
  } else {
    smp_recv_params params{};
    params.id = smp_transport_new_id(transport);
    params.source = 0;
    params.key = {2, 0, 0, 0};
    params.label = "large";
    params.allocate = &AllocateLarge;
    params.done = &LargeDone;
    params.release = &LargeRelease;
    params.arg = &call;
    smp_transport_recv(transport, &params);
  }
  CHECK(call.countdown.Wait());
  CHECK(call.code == SMP_OK && call.buffer.Filled());
}

std::string Stats(smp_transport* transport) {
  std::string text(smp_transport_stats(transport, nullptr, 0) + 4096, '\0');
  smp_transport_stats(transport, &text[0], text.size());
  return text;
}

// Nobody but this user may write into the memory that the ranks of a host share.
void CheckSharedMemory() {
  std::ifstream segments("/proc/sysvipc/shm");
  std::string line;
  std::getline(segments, line);
  while (std::getline(segments, line)) {
    std::istringstream fields(line);
    long key, id, mode, bytes, creator;
    CHECK(fields >> key >> id >> std::oct >> mode >> std::dec >> bytes >> creator);
    CHECK(creator != getpid() || (mode & 0077) == 0);
  }
  int files = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    char name[256] = "";
    struct stat file{};
    if (readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), name, sizeof(name) - 1) < 0 ||
        std::strstr(name, "ucx_shm_posix") == nullptr || fstat(fd, &file) != 0) {
      continue;
    }
    CHECK((file.st_mode & 0077) == 0);
    ++files;
  }
  CHECK(files > 0);
}

// Before a rank knows the addresses, a stranger says that it is another rank, which has said so
// before.
void RunEarlyStranger() {
  const auto start = [](smp_transport* rank, const std::vector<std::string>& addresses,
                        const std::string& secret) {
    const void* data[] = {addresses[0].data(), addresses[1].data()};
    const size_t bytes[] = {addresses[0].size(), addresses[1].size()};
    char error[1024] = "";
    CHECK(smp_transport_connect(rank, data, bytes, 2, secret.data(), secret.size(), error,
                                sizeof(error)) == SMP_OK);
  };
  const auto open = [](uint32_t rank) {
    smp_options options;
    smp_options_init(&options);
    options.end_process = 0;
    options.watch_signals = 0;
    options.watch_launcher = 0;
    char error[256] = "";
    smp_transport* transport = smp_transport_create(rank, 2, &options, error, sizeof(error));
    CHECK(transport != nullptr);
    return transport;
  };
  for (int i = 0; i < 10; ++i) {
    smp_transport* ranks[] = {open(0), open(1)};
    smp_transport* stranger = open(1);
    const std::vector<std::string> addresses = {AddressOf(ranks[0]), AddressOf(ranks[1])};
    start(ranks[1], addresses, kSecret);
    start(stranger, {addresses[0], AddressOf(stranger)}, "not the secret, but as long as it is");
    CHECK(smp_transport_goodbye(stranger, 20) == SMP_OK);  // what it had to say is out
    start(ranks[0], addresses, kSecret);
    for (smp_transport* rank : ranks) {
      char error[1024] = "";
      const int code = smp_transport_wait_connected(rank, 20, error, sizeof(error));
      if (code != SMP_OK) std::fprintf(stderr, "%s\n", error);
      CHECK(code == SMP_OK);
    }
    for (smp_transport* rank : {ranks[0], ranks[1], stranger}) smp_transport_destroy(rank);
  }
}

void RunRank(uint32_t rank, bool reads, const Line& line) {
  smp_transport* transport = Open(rank, reads);
  line.Put(AddressOf(transport));
  std::vector<std::string> addresses;
  for (uint32_t r = 0; r < kSize; ++r) addresses.push_back(line.Take());
  Connect(transport, addresses);
  CheckSharedMemory();
  ManyMessages(transport, rank);
  if (!is_small) MoreThan2GiB(transport, rank);
  const std::string does_not = reads ? "\"reads_memory\": false" : "\"reads_memory\": true";
  CHECK(Stats(transport).find(does_not) == std::string::npos);
  line.Put("exchanged");

  // Rank 0 is visited by an intruder, who claims to be rank 1.
  if (rank == 0) {
    Call call;
    Countdown countdown(1);
    call.countdown = &countdown;
    smp_recv_params params{};
    params.id = smp_transport_new_id(transport);
    params.source = 1;
    params.key = {66, 6, 6, 6};
    params.label = "forged";
    params.allocate = &Allocate;
    params.done = &Done;
    params.release = &Release;
    params.arg = &call;
    smp_transport_recv(transport, &params);
    CHECK(line.Take() == "the intruder has sent");
    // Its messages are in rank 0's memory: 3 forged ones, each refused and none delivered.
    std::string stats;
    for (int i = 0; i < 20000; ++i) {
      stats = Stats(transport);
      if (stats.find("\"refused_messages\": 3,") != std::string::npos) break;
      usleep(1000);
    }
    CHECK(stats.find("\"refused_messages\": 3,") != std::string::npos);
    CHECK(call.code == -1);
    smp_transport_cancel(transport, params.id);
    CHECK(countdown.Wait());
    CHECK(call.code == SMP_CANCELLED);
  }
  line.Put("done");
  CHECK(line.Take() == "leave");
  CHECK(smp_transport_goodbye(transport, 5) == SMP_OK);
  smp_transport_destroy(transport);
  _exit(0);
}

// A process that knows rank 0's address but not the secret sends it a well-formed message, once as
// it is, once with a code under a key of its own. The last one is as rank 1 would send it, but for
// the payload, which was changed on the way.
void RunIntruder(const std::string& address, const std::string& claimed) {
  smp::Address target, source;
  CHECK(smp::Address::Decode(address, &target));
  CHECK(smp::Address::Decode(claimed, &source));
  ucp_config_t* config;
  CHECK(ucp_config_read(nullptr, nullptr, &config) == UCS_OK);
  CHECK(ucp_config_modify(config, "TLS", "posix,self") == UCS_OK);
  CHECK(ucp_config_modify(config, "POSIX_ERROR_HANDLING", "y") == UCS_OK);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  ucp_context_h context;
  CHECK(ucp_init(&params, config, &context) == UCS_OK);
  ucp_worker_params_t worker_params{};
  ucp_worker_h worker;
  CHECK(ucp_worker_create(context, &worker_params, &worker) == UCS_OK);
  ucp_ep_params_t ep_params{};
  ep_params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  ep_params.address = reinterpret_cast<const ucp_address_t*>(target.worker.data());
  ep_params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  ucp_ep_h ep;
  CHECK(ucp_ep_create(worker, &ep_params, &ep) == UCS_OK);
  const smp::SipKey own{1, 2}, honest = smp::KeyOf(kSecret, source, target);
  const smp::SipKey* keys[] = {nullptr, &own, &honest};
  for (int i = 0; i < 3; ++i) {
    smp::MessageHead head{};
    head.kind = smp::MessageKind::kData;
    head.source = 1;
    head.destination = 0;
    head.sequence = 60000 + static_cast<uint64_t>(i);
    head.key = {66, 6, 6, 6};
    head.dtype = 9;
    head.ndim = 1;
    head.bytes = 6;
    const int64_t dims[] = {0};
    const std::string header =
        smp::EncodeMessage(head, dims, "forged", keys[i], i == 2 ? "honest" : "forged");
    ucp_request_param_t send{};
    send.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    send.flags = UCP_AM_SEND_FLAG_EAGER;
    ucs_status_ptr_t request =
        ucp_am_send_nbx(ep, 7, header.data(), header.size(), "forged", 6, &send);
    while (UCS_PTR_IS_PTR(request) && ucp_request_check_status(request) == UCS_INPROGRESS) {
      ucp_worker_progress(worker);
    }
    CHECK(!UCS_PTR_IS_ERR(request));
  }
  ucp_request_param_t flush{};
  ucs_status_ptr_t request = ucp_ep_flush_nbx(ep, &flush);
  while (UCS_PTR_IS_PTR(request) && ucp_request_check_status(request) == UCS_INPROGRESS) {
    ucp_worker_progress(worker);
  }
  _exit(0);
}

pid_t Fork(const std::function<void()>& child) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    child();
    _exit(0);
  }
  return pid;
}

void Join(pid_t pid, int exit_code = 0) {
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == exit_code);
}

// A process's start has a guard of its own, and closing it was to leave the transport without one.
void RunUncaught() {
  char no_guard[256] = "";
  smp_start_guard* guard = smp_start_guard_create("rank 0", no_guard, sizeof(no_guard));
  CHECK(guard != nullptr);
  smp_options options;
  smp_options_init(&options);
  options.watch_launcher = 0;
  options.watch_signals = 0;
  options.grace_s = 0.2;
  char error[256] = "";
  smp_transport* transport = smp_transport_create(0, 1, &options, error, sizeof(error));
  CHECK(transport != nullptr);
  smp_start_guard_close(guard);
  smp_start_guard_free(guard);
  smp_transport_watch_signals(transport);
  std::thread([] { throw gloo::IoException("Connection closed by peer"); }).detach();
  smp_transport_abort(transport, R"({"message": "rank 1 was lost"})", 7, 0.1);
  pause();
}

// Horovod's thread hears of the end of a rank before the launcher sends its signal.
void RunUncaughtInStart() {
  char error[256] = "";
  smp_start_guard* guard = smp_start_guard_create("rank 0", error, sizeof(error));
  CHECK(guard != nullptr);
  CHECK(smp_start_guard_wait(guard, 0.0) == 0);
  std::thread([] { throw gloo::IoException("Connection closed by peer"); }).detach();
  kill(getpid(), SIGTERM);
  CHECK(smp_start_guard_wait(guard, 60.0) == 1);
  smp_start_guard_say(guard, ": rank 1 had ended");
  pause();
}

void RunFleet(bool reads) {
  std::vector<Line> lines;
  std::vector<pid_t> ranks;
  for (uint32_t r = 0; r < kSize; ++r) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    lines.push_back({ends[0]});
    const Line theirs{ends[1]};
    ranks.push_back(Fork([=] { RunRank(r, reads, theirs); }));
    close(ends[1]);
  }
  std::vector<std::string> addresses;
  for (const Line& line : lines) addresses.push_back(line.Take());
  for (const Line& line : lines) {
    for (const std::string& address : addresses) line.Put(address);
  }
  for (const Line& line : lines) CHECK(line.Take() == "exchanged");
  Join(Fork([&] { RunIntruder(addresses[0], addresses[1]); }));
  lines[0].Put("the intruder has sent");
  for (const Line& line : lines) CHECK(line.Take() == "done");
  for (const Line& line : lines) line.Put("leave");
  for (pid_t pid : ranks) Join(pid);
  for (const Line& line : lines) close(line.fd);
}

}  // namespace

int main(int argc, char** argv) {
  is_small = argc > 1 && std::strcmp(argv[1], "small") == 0;
  alarm(240);
  Join(Fork(RunUncaught), 7);
  Join(Fork(RunEarlyStranger));
  int status = 0;
  CHECK(waitpid(Fork(RunUncaughtInStart), &status, 0) > 0);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
  if (!is_small) RunFleet(true);
  RunFleet(false);
  std::puts("transport_test: ok");
  return 0;
}
