#include "transport/peer_memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "transport/address.h"

namespace smp {

int ReadPeerMemory(int32_t pid, uint64_t address, void* to, size_t bytes) {
  size_t done = 0;
  // One call moves 2 GiB at most, and stops early at memory that is not there.
  while (done < bytes) {
    iovec local{static_cast<char*>(to) + done, bytes - done};
    iovec remote{reinterpret_cast<void*>(address + done), bytes - done};
    const ssize_t count = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EFAULT;
    done += static_cast<size_t>(count);
  }
  return 0;
}

bool ReadOffer(int32_t pid, const Offer& offer, void* to, int* error) {
  *error = ReadPeerMemory(pid, offer.data, to, offer.bytes);
  if (*error != 0) return false;
  // Looked at behind the tensor: what was read is whole if it was there until now.
  uint64_t value = 0;
  *error = ReadPeerMemory(pid, offer.guard, &value, sizeof(value));
  return *error == 0 && value == offer.value;
}

int32_t CommonAncestor(const std::vector<int32_t>& pids,
                       const std::function<int32_t(int32_t)>& parent_of) {
  std::vector<int32_t> common;  // from the nearest to the farthest
  for (size_t i = 0; i < pids.size(); ++i) {
    std::vector<int32_t> line;
    for (int32_t pid = pids[i]; pid > 1; pid = parent_of(pid)) line.push_back(pid);
    if (i == 0) {
      common = line;
      continue;
    }
    const auto is_foreign = [&line](int32_t pid) {
      return std::find(line.begin(), line.end(), pid) == line.end();
    };
    common.erase(std::remove_if(common.begin(), common.end(), is_foreign), common.end());
  }
  return common.empty() ? 0 : common.front();
}

void AllowReaders(const std::vector<int32_t>& pids) {
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  if (scope != 1) return;
  const int32_t ancestor = CommonAncestor(pids, &ParentOfProcess);
  if (ancestor > 0) prctl(PR_SET_PTRACER, static_cast<unsigned long>(ancestor), 0, 0, 0);
}

}  // namespace smp
