// UCX, reduced to what the transport needs of it: one worker, one endpoint per peer, messages with
// a header. Not thread-safe: the transport holds its lock around every call.
#ifndef SMP_TF_OPS_CC_TRANSPORT_UCX_WORKER_H_
#define SMP_TF_OPS_CC_TRANSPORT_UCX_WORKER_H_

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace smp {

// Up to here a message fits one fragment of shared memory and travels with its header; above, the
// receiver fetches it into its final place.
constexpr size_t kEagerBytes = 8000;

// Receives what the worker has to say, inside UcxWorker::Progress.
class UcxEvents {
 public:
  virtual ~UcxEvents() = default;
  // A message came. `rendezvous`: `data` is a descriptor for FetchRendezvous or Drop, and the
  // function returns whether it keeps it. Otherwise `data` is valid during the call only.
  virtual bool OnMessage(const void* header, size_t header_bytes, void* data, size_t bytes,
                         bool rendezvous) = 0;
  virtual void OnPeerError(uint32_t peer, const std::string& reason) = 0;
  // A send or fetch that was started with `operation` and did not complete at once has ended.
  virtual void OnComplete(uint64_t operation, ucs_status_t status) = 0;
};

struct UcxOptions {
  bool single_host = true;
  std::string network_devices;
};

class UcxWorker {
 public:
  // Throws std::runtime_error with UCX's reason.
  UcxWorker(uint32_t size, const UcxOptions& options, UcxEvents* events);
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  const std::string& address() const { return address_; }
  int event_fd() const { return event_fd_; }

  void Connect(uint32_t peer, const std::string& address, bool is_self);
  bool IsConnected(uint32_t peer) const { return peer < peers_.size() && peers_[peer].ep; }

  // Both return UCS_OK (done), UCS_INPROGRESS (OnComplete will follow), or an error.
  ucs_status_t Send(uint32_t peer, const std::string& header, const void* data, size_t bytes,
                    bool control, uint64_t operation);
  ucs_status_t FetchRendezvous(void* descriptor, void* data, size_t bytes, uint64_t operation);
  void Drop(void* descriptor);

  bool Progress() { return ucp_worker_progress(worker_) != 0; }
  // False if there is work left: progress again.
  bool Arm() { return ucp_worker_arm(worker_) == UCS_OK; }

  // Names of the transports in use to a peer, separated by commas.
  std::string Lanes(uint32_t peer) const;

 private:
  struct Peer {
    UcxWorker* owner = nullptr;
    uint32_t rank = 0;
    ucp_ep_h ep = nullptr;
  };

  UcxEvents* events_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::string address_;
  int event_fd_ = -1;
  std::vector<Peer> peers_;  // never resized: UCX holds pointers into it

  static ucs_status_t HandleMessage(void* arg, const void* header, size_t header_bytes, void* data,
                                    size_t bytes, const ucp_am_recv_param_t* param);
  static void HandleError(void* arg, ucp_ep_h ep, ucs_status_t status);
  static void HandleSent(void* request, ucs_status_t status, void* operation);
  static void HandleFetched(void* request, ucs_status_t status, size_t bytes, void* operation);
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_UCX_WORKER_H_
