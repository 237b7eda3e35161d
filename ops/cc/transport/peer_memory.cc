#include "transport/peer_memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "transport/address.h"
#include "transport/second_reader.h"

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

ReadResult ReadOffer(int32_t pid, const Offer& offer, void* to, SecondReader* second) {
  const int error = second == nullptr ? ReadPeerMemory(pid, offer.data, to, offer.bytes)
                                      : second->Read(pid, offer.data, to, offer.bytes);
  if (error == ESRCH) return {ReadState::kProcessEnded, error};
  // Looked at behind the tensor: what was read is whole if it was there until now.
  uint64_t value = 0;
  const int of_guard = ReadPeerMemory(pid, offer.guard, &value, sizeof(value));
  if (of_guard == ESRCH) return {ReadState::kProcessEnded, of_guard};
  // With the sender's transport its guards are gone, too.
  if (of_guard == EFAULT) return {ReadState::kTakenBack, of_guard};
  if (of_guard == 0 && value != offer.value) return {ReadState::kTakenBack, 0};
  if (error != 0 || of_guard != 0) return {ReadState::kNotReadable, error != 0 ? error : of_guard};
  return {ReadState::kWhole, 0};
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

bool AllowReaders(const std::vector<int32_t>& pids) {
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  if (scope != 1) return false;
  const int32_t ancestor = CommonAncestor(pids, &ParentOfProcess);
  return ancestor > 0 && prctl(PR_SET_PTRACER, static_cast<unsigned long>(ancestor), 0, 0, 0) == 0;
}

void DisallowReaders() { prctl(PR_SET_PTRACER, 0, 0, 0, 0); }

}  // namespace smp
