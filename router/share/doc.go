// Package share lets routers side by side know of each other's choices: what
// each has in flight on each worker, and where it has sent which prefixes. It
// carries hints only. Nothing waits for it, and what is lost costs a worse
// choice at most.
//
// Each router says what has changed, at most every Config.Interval; all it has
// once a second, which repairs what was lost and is its sign of life; and where
// new prefixes went, every 100 ms and a bounded amount. A new router asks, once
// it has workers, and one of the others tells it where the latest prefixes are. Numbers are absolute,
// so nothing can drift. A router that falls silent is forgotten after
// Config.Expire, with the load that it told of; one that ends says so. Each
// start of a router has a new random id, so the word of an earlier life is
// never taken for that of a later one.
//
// A router that hears no other says only that it is there.
package share
