// Package kvevents is what inference engines publish about their KV caches: which blocks of which
// token prefixes they hold, in which tier. It reads the event batches of vLLM and SGLang in all
// their shapes, writes vLLM's, follows a publisher over ZMQ (Feed) and is one (Publisher).
//
// A publisher sends three frames: a topic, a sequence number (8 bytes, big endian, from 0 at each
// start), and a batch in msgpack: [time, events, rank]. PUB sockets lose messages silently, so a
// Feed watches the sequence numbers and asks the publisher's replay socket for what it missed. If
// that is lost for good, the Feed forgets all it knew.
//
// Engines name blocks by hashes that mean nothing to others (vLLM seeds them at random), so they
// are opaque names within one publisher. A block's prefix follows from its parent and token ids.
//
// Engines authenticate nobody, so only the choice of a worker may depend on what they publish. Our
// own publishers carry prompts' token ids and ask for the fleet's secret (PublisherConfig.Ring).
// Both ends derive Curve25519 private keys from it, trust.Secret.Key with trust.Events for
// "publisher" and "subscriber", and speak ZMTP's CURVE. A publisher has one key for each secret in
// force, and admits one client key for each.
//
// tinylib/msgp's functions on byte slices read and write the msgpack, without generated code. This
// package adds the bounds: a list or map may claim no more elements than there are bytes.
package kvevents
