#include "transport/address.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>

namespace smp {
namespace {

struct Wire {
  char magic[8];
  uint32_t rank;
  uint32_t size;
  int32_t pid;
  uint32_t worker_bytes;
  uint64_t start_time;
  uint64_t nonce_at;
  uint8_t nonce[32];
  uint8_t host_id[32];
  char hostname[64];
};
constexpr char kAddressMagic[8] = {'s', 'm', 'p', 'a', 'd', 'd', 'r', '2'};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

// A numeric field of /proc/PID/stat, counted from 1 as proc(5) does; 0 without the process.
uint64_t FieldOfStat(int32_t pid, int number) {
  const std::string stat = ReadFile("/proc/" + std::to_string(pid) + "/stat");
  // Fields are counted behind the last ')': the command before it may hold anything.
  const size_t end = stat.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(stat.substr(end + 1));
  std::string field;
  for (int i = 3; i <= number; ++i) fields >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

}  // namespace

std::string Address::Encode() const {
  Wire wire{};
  std::memcpy(wire.magic, kAddressMagic, sizeof(wire.magic));
  wire.rank = rank;
  wire.size = size;
  wire.pid = pid;
  wire.worker_bytes = static_cast<uint32_t>(worker.size());
  wire.start_time = start_time;
  wire.nonce_at = nonce_at;
  std::memcpy(wire.nonce, nonce.data(), nonce.size());
  std::memcpy(wire.host_id, host_id.data(), host_id.size());
  std::strncpy(wire.hostname, hostname.c_str(), sizeof(wire.hostname) - 1);
  return std::string(reinterpret_cast<const char*>(&wire), sizeof(wire)) + worker;
}

bool Address::Decode(std::string_view bytes, Address* address) {
  Wire wire;
  if (bytes.size() < sizeof(wire)) return false;
  std::memcpy(&wire, bytes.data(), sizeof(wire));
  if (std::memcmp(wire.magic, kAddressMagic, sizeof(wire.magic)) != 0) return false;
  if (bytes.size() != sizeof(wire) + wire.worker_bytes) return false;
  address->rank = wire.rank;
  address->size = wire.size;
  address->pid = wire.pid;
  address->start_time = wire.start_time;
  address->nonce_at = wire.nonce_at;
  std::memcpy(address->nonce.data(), wire.nonce, sizeof(wire.nonce));
  std::memcpy(address->host_id.data(), wire.host_id, sizeof(wire.host_id));
  wire.hostname[sizeof(wire.hostname) - 1] = '\0';
  address->hostname = wire.hostname;
  address->worker = std::string(bytes.substr(sizeof(wire)));
  return true;
}

uint64_t ProcessStartTime(int32_t pid) { return FieldOfStat(pid, 22); }

int32_t ParentOfProcess(int32_t pid) { return static_cast<int32_t>(FieldOfStat(pid, 4)); }

Address MakeLocalAddress(uint32_t rank, uint32_t size) {
  Address address;
  address.rank = rank;
  address.size = size;
  address.pid = getpid();
  address.start_time = ProcessStartTime(address.pid);
  if (getrandom(address.nonce.data(), address.nonce.size(), 0) !=
      static_cast<ssize_t>(address.nonce.size())) {
    throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  struct stat ns{};
  stat("/proc/self/ns/pid", &ns);
  address.host_id =
      Sha256(ReadFile("/proc/sys/kernel/random/boot_id") + "/" + std::to_string(ns.st_ino));
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  address.hostname = name;
  return address;
}

}  // namespace smp
