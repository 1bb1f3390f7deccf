// Link: the data connection to one peer. Carries puts, gets and signals in frames, in order, with bounded memory; no call blocks except
// say_bye. GPU memory passes through staging slots; a slot is free again when its copy has ended.
#pragma once
#include <deque>
#include <memory>

#include "copies.h"
#include "frame.h"
#include "region.h"
#include "request.h"
#include "signals.h"
#include "socket.h"

namespace moecomm::rma {

class Link {
  public:
    static constexpr size_t kSlots = 4;           // in each direction
    static constexpr size_t kMostGets = 64;       // gets that a side may have requested and not yet received
    static constexpr size_t kMostArrived = 1024;  // received frames that wait for earlier copies

    struct Shared {  // shared by all links of a communicator
        explicit Shared(const std::shared_ptr<Gpu>& gpu) : out(gpu), in(gpu) {}
        CopyStream out, in;
    };

    Link(Descriptor socket, int peer, const std::shared_ptr<Gpu>& gpu, Shared& copies, const Registry& registry, Signals& signals,
         std::chrono::milliseconds patience);

    // Queue an operation. The request is done when the peer acknowledges it; without the signal, its bytes are then in place.
    void push(Request& request, bool with_signal);
    // Make progress without blocking. Both throw Failure if the link can no longer be used.
    void receive();
    void send();
    void check_patience(Clock::time_point now);
    void say_bye(Deadline deadline);  // waits until the deadline at most

    void shut() { socket_.reset(); }  // after a failure: only the destructor may be called afterwards
    int socket() const { return socket_.get(); }
    bool has_to_send() const {
        return writing_ || acked_ != applied_ || !slots_out_.empty() || !outbox_.empty() || !answers_.empty() || bye_due_;
    }
    bool has_to_settle() const { return !arrived_.empty() || header_got_ == sizeof incoming_; }
    bool closed() const { return peer_left_; }
    size_t unfinished() const { return outbox_.size() + puts_.size() + gets_.size(); }

  private:
    struct Outgoing {  // an operation of this rank
        Request* request;
        bool with_signal;
        uint64_t sent;
    };
    struct Answer {  // to a get of the peer
        std::shared_ptr<Region> region;
        uint64_t offset, bytes, number;
        uint64_t sent;
    };
    struct SlotOut {
        Frame frame;
        size_t slot;
        Ticket ticket;
    };
    struct Arrived {
        Frame frame;
        std::shared_ptr<Region> region;
        Ticket ticket;
    };

    void stage();         // link_send.cpp
    bool stage_answer();  // false: nothing to stage
    bool stage_operation();
    void fill_slot(const Frame& frame, const char* from, bool on_gpu);
    bool choose();       // the next frame to write
    bool write();        // false: the socket is full
    void take_header();  // link_receive.cpp
    bool take_payload();
    void accept_frame();
    void settle();
    void settle_one(Arrived& arrived);
    void take_ack(uint64_t operations);
    [[noreturn]] void lied(const std::string& what) const;

    Descriptor socket_;
    const int peer_;
    const Registry& registry_;
    Signals& signals_;
    const std::chrono::milliseconds patience_;
    Clock::time_point heard_;
    bool peer_left_ = false, bye_due_ = false;

    // out
    CopyStream& copies_out_;
    Staging staging_out_;
    std::deque<Outgoing> outbox_;
    // Answers overtake the outbox, so that two ranks that wait for each other's answers before they send more cannot deadlock.
    std::deque<Answer> answers_;
    std::deque<SlotOut> slots_out_;
    size_t next_slot_out_ = 0;
    Frame writing_frame_{};
    const char* writing_payload_ = nullptr;
    bool writing_ = false, writing_slot_ = false;
    size_t written_ = 0;
    uint64_t frames_out_ = 0;
    std::deque<Request*> puts_;  // sent, or being sent, and not yet acknowledged
    uint64_t puts_sent_ = 0;     // operations whose last frame has been written; puts_ may be longer
    uint64_t puts_done_ = 0;
    std::deque<Request*> gets_;
    uint64_t gets_asked_ = 0, gets_answered_ = 0, gets_done_ = 0;  // requested; all data received; all data in place

    // in
    CopyStream& copies_in_;
    Staging staging_in_;
    Ticket slot_in_[kSlots] = {};
    size_t next_slot_in_ = 0;
    Frame incoming_{};
    std::shared_ptr<Region> target_;
    char* destination_ = nullptr;
    size_t header_got_ = 0, payload_got_ = 0;
    uint64_t frames_in_ = 0, get_received_ = 0;
    std::deque<Arrived> arrived_;
    uint64_t asked_of_us_ = 0, answered_by_us_ = 0;
    uint64_t applied_ = 0, acked_ = 0;
};

}  // namespace moecomm::rma
