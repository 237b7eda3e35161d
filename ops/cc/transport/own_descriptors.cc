#include "transport/own_descriptors.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>

namespace smp {
namespace {

std::mutex roots_mutex;
// Never freed: a process may fork while it ends.
std::vector<int>& Roots() {
  static auto* const roots = new std::vector<int>;
  return *roots;
}

void CloseInChild() {
  for (const int root : Roots()) {
    for (const int descriptor : DescriptorsBelow(root)) close(descriptor);
  }
  Roots().clear();
  roots_mutex.unlock();
}

}  // namespace

std::vector<int> DescriptorsBelow(int epoll) {
  std::vector<int> found{epoll};
  for (size_t i = 0; i < found.size(); ++i) {
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(found[i]));
    for (std::string line; std::getline(info, line);) {
      // tfd:        7 events:       19 data: ...  pos:0 ino:1a2b sdev:9
      int descriptor = -1;
      std::string word;
      std::istringstream words(line);
      if (!(words >> word >> descriptor) || word != "tfd:") continue;
      const size_t inode = line.find("ino:");
      struct stat now{};
      // Closed since by whoever watched it, the number may be another file's.
      if (inode == std::string::npos || fstat(descriptor, &now) != 0 ||
          std::stoull(line.substr(inode + 4), nullptr, 16) != now.st_ino) {
        continue;
      }
      if (std::find(found.begin(), found.end(), descriptor) == found.end()) {
        found.push_back(descriptor);
      }
    }
  }
  return found;
}

OwnDescriptors::OwnDescriptors(int epoll) : epoll_(epoll) {
  static const int hooked =
      pthread_atfork([] { roots_mutex.lock(); }, [] { roots_mutex.unlock(); }, &CloseInChild);
  static_cast<void>(hooked);
  std::lock_guard<std::mutex> lock(roots_mutex);
  Roots().push_back(epoll);
}

OwnDescriptors::~OwnDescriptors() {
  std::lock_guard<std::mutex> lock(roots_mutex);
  Roots().erase(std::remove(Roots().begin(), Roots().end(), epoll_), Roots().end());
}

void OwnDescriptors::CloseOnExec() const {
  for (const int descriptor : DescriptorsBelow(epoll_)) {
    const int flags = fcntl(descriptor, F_GETFD);
    if (flags >= 0) fcntl(descriptor, F_SETFD, flags | FD_CLOEXEC);
  }
}

}  // namespace smp
