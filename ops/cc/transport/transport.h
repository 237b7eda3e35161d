// The transport of one rank: peers, pending operations, and the thread that drives them.
//
//   caller ── submit ──▶ queue ─┐                          ┌─▶ UCX ─▶ peers
//                               ├─▶ (under the lock) Step ─┤
//   progress thread ── epoll ───┘                          └─▶ endings ─▶ done, release (no lock)
//
// A caller that finds the lock free carries its own submission to UCX, which saves waking the
// progress thread; otherwise the progress thread takes it along. Whoever held the lock makes the
// copies and runs the endings that came up, after giving it back.
#ifndef SMP_TF_OPS_CC_TRANSPORT_TRANSPORT_H_
#define SMP_TF_OPS_CC_TRANSPORT_TRANSPORT_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "transport/activity.h"
#include "transport/address.h"
#include "transport/guardian.h"
#include "transport/huge_pages.h"
#include "transport/matching.h"
#include "transport/message.h"
#include "transport/own_descriptors.h"
#include "transport/peer_memory.h"
#include "transport/second_reader.h"
#include "transport/smp_transport.h"
#include "transport/ucx_worker.h"

namespace smp {

using Clock = std::chrono::steady_clock;

// Why an operation ends that comes behind "send of ..." when the transport is through.
constexpr char kTooLate[] = " comes after this rank has left the job";

// A send or a receive from its submission until its buffer is free.
struct Operation {
  uint64_t id = 0;
  bool is_send = false;
  uint32_t peer = 0;
  MessageKey key;
  std::string label;
  smp_done_fn done = nullptr;
  smp_release_fn release = nullptr;
  void* arg = nullptr;
  Clock::time_point posted;
  bool ended = false;     // done is called or about to be
  bool done_due = false;  // and some thread is on its way to call it, for whoever releases
  bool in_use = false;    // UCX, a copy or the receiver may touch the buffer

  // Of a send.
  int32_t dtype = 0;
  std::vector<int64_t> dims;
  smp_buffer buffer{};
  // Not 0 while the receiver may read the buffer from this process.
  std::atomic<uint64_t> guard{0};
  // Of a receive.
  smp_allocate_fn allocate = nullptr;
};

struct Traffic {
  uint64_t sent_messages = 0;
  uint64_t sent_bytes = 0;
  uint64_t received_messages = 0;
  uint64_t received_bytes = 0;
};

struct PeerState {
  Address address;
  bool same_host = false;
  int pidfd = -1;
  SipKey send_key, receive_key;
  Digest own_proof{}, expected_proof{};
  bool readable = false;  // this process may read its memory
  bool reads_us = false;  // and it ours
  bool verified = false;  // it proved the secret to us
  bool ready = false;     // and we to it
  bool departed = false;  // it said goodbye
  bool gone = false;      // its process ended, or UCX lost it
  std::string gone_reason;
  std::map<uint64_t, int64_t> steps_at_goodbye;
  int64_t averages_at_goodbye = 0;  // steps that average, of all programs
  uint64_t next_sequence = 0;
  SequenceWindow window;
  Traffic traffic;
  // Of the stall watch: one episode lasts until an operation with this peer ends well.
  bool stall_asked = false;
  bool stall_reported = false;
  Clock::time_point stall_asked_at;
  std::string stall_line;
};

class Transport : public UcxEvents {
 public:
  Transport(uint32_t rank, uint32_t size, const smp_options& options);
  ~Transport() override;

  const std::string& address() const { return encoded_address_; }
  void WatchSignals() { guardian_->WatchSignals(); }
  void HoldWords(double seconds) { guardian_->HoldWords(seconds); }
  void Connect(const std::vector<std::string>& addresses, const std::string& secret);
  int WaitConnected(double timeout_s, std::string* error);

  uint64_t NewId() { return next_id_.fetch_add(1); }
  void Send(const smp_send_params& params);
  void Receive(const smp_recv_params& params);
  void Cancel(uint64_t id);
  // Cancels a receive, unless its message is on the way into its memory: that would be lost.
  void Withdraw(uint64_t id);
  void CancelAll(const std::string& reason);

  Activity& activity() { return activity_; }
  void BeginStep(uint64_t program, int64_t step);
  void SetProgramRanks(uint64_t program, std::set<uint32_t> ranks);
  void SetAveragingRanks(uint64_t program, std::set<uint32_t> ranks);

  bool Goodbye(double timeout_s);
  // Until these peers have said goodbye, or are gone; false when the time is over before.
  bool AwaitGoodbyes(const std::set<uint32_t>& peers, double timeout_s);
  bool Abort(const std::string& cause_json, int exit_code, double timeout_s);
  std::string CauseJson();
  // What a rank is doing, as JSON; false if it does not answer in time or is not there.
  bool Ask(uint32_t peer, double timeout_s, std::string* answer);
  std::string Stats();
  std::string Lanes(uint32_t peer);

  // Ends all operations and threads. What is called afterwards, or meanwhile, does nothing or
  // fails. False if the progress thread is still in something that it called: then nothing may be
  // freed, ever.
  bool Shutdown();

 private:
  // --- transport.cc: submissions and the progress thread
  using Task = std::function<void()>;
  struct Submission {
    std::unique_ptr<Operation> operation;  // to start, or
    Task task;                             // to run
  };
  struct Ending {
    smp_done_fn done;
    smp_release_fn release;
    void* arg;
    int code;
    std::string message;
    uint64_t kept;  // the operation that is still here because its buffer is in use, or 0
  };
  void Submit(Submission submission);
  bool Queue(Submission* submission);  // false once nobody is left to take it
  bool Enqueue(Task task);             // like Submit, always left to the progress thread
  void EndUnstarted(const Operation& op) const;
  void Close();
  void Wake();
  bool RunSubmissions();
  bool RunEndings(std::unique_lock<std::mutex>* lock);
  void Release(Operation* op);
  void Run();
  bool Step(std::unique_lock<std::mutex>* lock);
  void Sleep();
  void Watch(int fd, uint64_t token);

  // --- transfer.cc: operations and the messages they meet
  void Start(std::unique_ptr<Operation> operation);
  void StartSend(Operation* op);
  void StartReceive(Operation* op);
  bool Deliver(Operation* op, const MessageView& view, void* data, size_t bytes, bool rendezvous);
  bool Place(Operation* op, const MessageView& view, size_t bytes);
  bool Keep(const MatchKey& key, ArrivedMessage message);
  bool OnData(const MessageView& view, void* data, size_t bytes, bool rendezvous);
  void End(Operation* op, int code, const std::string& message);
  void EndAll(int code, const std::string& message);
  void CountEnded(const Operation& op, uint64_t bytes);
  std::string Describe(const Operation& op) const;
  static int CodeOf(ucs_status_t status);

  // --- offers.cc: tensors that the receiver reads from the sender's memory
  struct Copy {
    uint64_t operation;
    int32_t pid;
    Offer offer;
    void* to;
  };
  bool CanRead(const Address& address) const;
  void SendOffer(Operation* op, MessageHead head);
  void OnOffer(const MessageView& view, const std::string& payload);
  void Take(Operation* op, const MessageView& view, const Offer& offer);
  void Answer(uint32_t sender, const Offer& offer, const std::string& words);
  bool RunCopy(std::unique_lock<std::mutex>* lock);
  void OnCopied(const Copy& copy, const ReadResult& result);
  void DropCopies();
  void SettleTakenBack();
  void OnTaken(uint32_t peer, uint64_t operation, const std::string& words);
  void WithdrawOffers(uint32_t peer);
  void OnUnsentOffer(uint64_t operation, ucs_status_t status);
  void RefuseArrived();

  // --- peers.cc: who they are, whether they are there
  bool OnMessage(const void* header, size_t header_bytes, void* data, size_t bytes,
                 bool rendezvous) override;
  void OnPeerError(uint32_t peer, const std::string& reason) override;
  void OnComplete(uint64_t operation, ucs_status_t status) override;
  void Meet();
  void CheckProof(uint32_t peer, const std::string& proof);
  void OnReady(uint32_t peer, bool reads_us);
  bool Refuse(const std::string& why, uint32_t claimed_source);
  void OnPeerExit(uint32_t peer);
  void HandleGonePeers();
  std::string PeerInWords(uint32_t peer) const;
  static std::string RankInWords(const Address& address);

  // --- control.cc: causes, goodbyes, stalls
  void SendControl(uint32_t peer, MessageKind kind, std::string payload, int64_t argument);
  struct Control {
    std::string payload;
    uint32_t peer;
    MessageKind kind;
    uint64_t operation;  // that is offered, or 0
  };
  void SendWithCode(MessageHead head, const std::vector<int64_t>& dims, const std::string& label,
                    std::string payload, const SipKey* key, uint64_t operation);
  void OnUnsent(const Control& control, ucs_status_t status);
  bool WaitControlSent(double timeout_s);
  // Makes this the cause unless there is one.
  bool Fail(const std::string& kind, const std::string& message, int exit_code, int code);
  // The same for something that happened to this process.
  void FailHere(const std::string& kind, const std::string& what, int exit_code);
  bool SetCause(const std::string& whole, int exit_code, int code, bool tell_others);
  void OnAbort(const std::string& json, int exit_code);
  void OnGoodbye(uint32_t peer, const std::string& payload);
  bool LeftEarly(uint32_t peer, std::string* message) const;
  // Fails, with the words for a rank that has left, if the step under way needs it.
  void CheckStepAfterGoodbye(uint32_t peer);
  // Fails because an operation needs a rank that has left; returns the words.
  std::string FailFor(const Operation& op);
  std::string StatusInWords() const;
  void OnStallAnswer(uint32_t peer, const std::string& text);
  void CheckStalls();
  void ReportStall(uint32_t peer, const std::string& what_it_does);

  // --- questions.cc: what are you doing?
  void OnAskStatus(uint32_t peer, int64_t question);
  void OnStatus(uint32_t peer, const std::string& answer, int64_t question);
  std::string StatusJson(uint32_t asker) const;

  const uint32_t rank_;
  const uint32_t size_;
  const smp_options options_;
  bool may_spin_ = false;
  Clock::duration spin_{};
  Address local_;
  std::string encoded_address_;
  Activity activity_;

  std::mutex queue_mutex_;
  std::vector<Submission> queue_;
  bool closed_ = false;  // what is submitted from here on ends at once
  std::atomic<bool> wake_pending_{false};
  std::atomic<uint64_t> next_id_{1};

  std::mutex mutex_;  // guards everything below up to the next group, and UCX
  std::unique_ptr<UcxWorker> worker_;
  std::vector<PeerState> peers_;
  bool met_ = false;
  bool left_ = false;  // we said goodbye
  std::unordered_map<uint64_t, std::unique_ptr<Operation>> operations_;
  MatchTable table_;
  std::vector<Ending> endings_;
  std::deque<Copy> copies_;
  int copying_ = 0;                                                // copies that threads are making
  std::deque<std::pair<Clock::time_point, uint64_t>> taken_back_;  // receives that wait for a cause
  bool readers_allowed_ = false;
  std::unordered_map<uint64_t, Control> controls_;  // what UCX still needs
  std::condition_variable changed_;  // peers became ready, controls were sent, a thread ended
  std::unordered_map<int64_t, std::string> questions_;  // asked, with the answer once it is there
  bool gone_pending_ = false;
  bool needs_progress_ = false;  // something was started that did not complete at once
  std::map<uint64_t, std::set<uint32_t>> program_ranks_;
  std::map<uint64_t, std::set<uint32_t>> averaging_ranks_;
  std::map<std::tuple<uint64_t, uint64_t, uint32_t, bool>, std::pair<uint64_t, uint64_t>> edges_;
  uint64_t refused_ = 0;
  uint64_t rounds_ = 0;  // looks of the progress thread for work
  uint64_t offer_salt_ = 0;
  Clock::time_point next_check_;
  Clock::time_point last_moved_;

  SecondReader second_reader_;
  HugePages huge_pages_;

  std::mutex cause_mutex_;
  std::string cause_;
  std::string cause_message_;
  int cause_code_ = SMP_ABORTED;
  std::atomic<bool> failed_{false};
  std::atomic<bool> any_departed_{false};

  int epoll_ = -1;
  int wake_fd_ = -1;
  std::optional<OwnDescriptors> own_descriptors_;
  std::atomic<bool> stopping_{false};
  bool shut_down_ = false;
  bool thread_ended_ = false;
  std::unique_ptr<Guardian> guardian_;
  std::thread thread_;
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_TRANSPORT_TRANSPORT_H_
