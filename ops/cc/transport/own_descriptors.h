// The descriptors that this process alone should have open, UCX's among them: a connection ends for
// the other side when the last process that has it open closes it, or ends.
//
//   epoll ─┬─ wake-up event
//          ├─ a pidfd for each rank of this host
//          └─ UCX's event set ─┬─ wake-up sockets of shared memory
//                              └─ TCP's event set ── a socket for each rank of another host
//
// UCX does not say which descriptors are its own; the event sets do. Not among them is the socket
// that UCX's own thread listens at: nobody is connected through it.
#ifndef SMP_TF_OPS_CC_TRANSPORT_OWN_DESCRIPTORS_H_
#define SMP_TF_OPS_CC_TRANSPORT_OWN_DESCRIPTORS_H_

#include <vector>

namespace smp {

// An epoll descriptor and every one that is watched through it, over other event sets too.
std::vector<int> DescriptorsBelow(int epoll);

// While it lives, a child that is forked closes all descriptors below one.
class OwnDescriptors {
 public:
  explicit OwnDescriptors(int epoll);
  ~OwnDescriptors();
  OwnDescriptors(const OwnDescriptors&) = delete;
  OwnDescriptors& operator=(const OwnDescriptors&) = delete;

  // A program that this process starts does not have them either.
  void CloseOnExec() const;

 private:
  const int epoll_;
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_OWN_DESCRIPTORS_H_
