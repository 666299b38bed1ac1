package limit

import (
	"container/list"
	"math"
)

// Item is one waiting request.
type Item struct {
	Tenant string
	Weight float64 // the tenant's share within its class; 0 is 1
	Class  Class
	Cost   float64 // estimated tokens, prompt and output
	Bytes  int64   // that it holds while it waits

	flow  *flow
	place *list.Element

	turn chan struct{} // Gate's: closed when it may run or has to go
	err  error         // why it has to go; set before turn is closed
}

// Bounds are those of a queue.
type Bounds struct {
	Items   int
	Bytes   int64
	Weights [Classes]float64 // shares of the classes, each above 0
}

// flow is the waiting requests of one tenant in one class, in order of arrival. tag is the
// virtual time at which its next request starts.
type flow struct {
	tenant string
	class  *class
	weight float64
	tag    float64
	items  list.List // of *Item
	bytes  int64
	cost   float64

	serve, shed int           // places in class.active and Queue.fat
	idle        *list.Element // in class.idle while nothing waits
}

// class is the flows of one priority.
type class struct {
	weight  float64
	tag     float64 // its own standing among the classes
	now     float64 // its tenants' virtual time: when the last one served started
	n       int
	bytes   int64
	weights float64 // sum over active
	active  heap    // flows with something waiting, the smallest tag first
	flows   map[string]*flow
	idle    list.List // flows that are ahead of now, longest idle first
}

// Queue orders waiting requests. A decision takes O(log n) in the waiting tenants. It
// remembers what waits, and maxIdle tenants per class.
type Queue struct {
	b       Bounds
	now     float64 // the classes' virtual time
	n       int
	bytes   int64
	cost    float64
	classes [Classes]class
	fat     heap // all active flows, the one with most of the queue first
}

// maxIdle is how many idle tenants per class are remembered as having been served ahead of
// others.
const maxIdle = 1024

// maxCost is the most tokens that one request counts as, and the most that corrections can
// put a tenant or a class ahead of others: a wrong number of a client or an engine must
// starve nobody.
const maxCost = 1 << 20

// NewQueue returns an empty queue.
func NewQueue(b Bounds) *Queue {
	q := &Queue{b: b}
	q.fat = heap{less: func(x, y *flow) bool { return q.share(x, 0, 0) > q.share(y, 0, 0) }, at: func(f *flow) *int { return &f.shed }}
	for i := range q.classes {
		c := &q.classes[i]
		c.weight, c.flows = b.Weights[i], map[string]*flow{}
		c.active = heap{less: func(x, y *flow) bool { return x.tag < y.tag }, at: func(f *flow) *int { return &f.serve }}
	}
	return q
}

// Set changes the bounds; what waits stays.
func (q *Queue) Set(b Bounds) {
	q.b = b
	for i := range q.classes {
		q.classes[i].weight = b.Weights[i]
	}
	all := q.fat.all // everybody's share has changed
	q.fat.all = nil
	for _, f := range all {
		q.fat.push(f)
	}
}

// Len is how many requests wait, and Bytes how much they hold.
func (q *Queue) Len() int     { return q.n }
func (q *Queue) Bytes() int64 { return q.bytes }

// LenOf is how many requests of a class wait.
func (q *Queue) LenOf(c Class) int { return q.classes[c].n }

// share is the part of the queue that a flow takes, with so much more in it, over what it
// is entitled to.
func (q *Queue) share(f *flow, more int, bytes int64) float64 {
	part := float64(f.items.Len()+more) / float64(max(q.b.Items, 1))
	part = max(part, float64(f.bytes+bytes)/float64(max(q.b.Bytes, 1)))
	return part / (f.weight * f.class.weight)
}

// Push adds a request. When there is no room, the newest requests of those that take most
// of the queue for their share are displaced. If that would be this one, it returns false
// and changes nothing.
func (q *Queue) Push(it *Item) (displaced []*Item, ok bool) {
	it.Cost = min(it.Cost, maxCost)
	f := q.flow(it)
	for q.n >= q.b.Items || q.bytes+it.Bytes > q.b.Bytes {
		if q.n == 0 || q.b.Items == 0 || it.Bytes > q.b.Bytes || q.share(q.fat.all[0], 0, 0) <= q.share(f, 1, it.Bytes) {
			for i := range displaced { // the oldest first
				back := displaced[len(displaced)-1-i]
				q.insert(back.flow, back)
			}
			return nil, false
		}
		last := q.fat.all[0].items.Back().Value.(*Item)
		q.Remove(last)
		displaced = append(displaced, last)
	}
	q.insert(f, it)
	return displaced, true
}

// insert adds a request to the end of its flow.
func (q *Queue) insert(f *flow, it *Item) {
	c := f.class
	if c.n == 0 {
		c.tag = max(c.tag, q.now)
	}
	it.flow = f
	it.place = f.items.PushBack(it)
	q.count(f, 1, it)
	if f.items.Len() > 1 {
		q.fat.fix(f)
		return
	}
	if f.idle != nil {
		c.idle.Remove(f.idle)
		f.idle = nil
	}
	c.flows[f.tenant] = f // it is new, or was dropped by a displacement
	f.tag = max(f.tag, c.now)
	c.weights += f.weight
	c.active.push(f)
	q.fat.push(f)
}

// flow finds or makes the request's flow; insert remembers it.
func (q *Queue) flow(it *Item) *flow {
	c := &q.classes[it.Class]
	weight := it.Weight
	if !(weight > 0) {
		weight = 1
	}
	f := c.flows[it.Tenant]
	switch {
	case f == nil:
		f = &flow{tenant: it.Tenant, class: c, weight: weight, serve: -1, shed: -1}
	case f.weight != weight:
		if f.shed >= 0 {
			c.weights += weight - f.weight
		}
		f.weight = weight
		if f.shed >= 0 {
			q.fat.fix(f)
		}
	}
	return f
}

// count adds a request to all sums, or takes it out.
func (q *Queue) count(f *flow, sign int, it *Item) {
	n, bytes, cost := sign, int64(sign)*it.Bytes, float64(sign)*it.Cost
	q.n += n
	q.bytes += bytes
	q.cost += cost
	f.class.n += n
	f.class.bytes += bytes
	f.bytes += bytes
	f.cost += cost
}

// Pop takes out the next request, nil if none waits.
func (q *Queue) Pop() *Item {
	var c *class
	for i := range q.classes {
		if next := &q.classes[i]; next.n > 0 && (c == nil || next.tag < c.tag) {
			c = next
		}
	}
	if c == nil {
		return nil
	}
	f := c.active.all[0]
	it := f.items.Front().Value.(*Item)
	q.now, c.now = c.tag, f.tag
	cost := max(it.Cost, 1)
	c.tag += cost / c.weight
	f.tag += cost / f.weight
	c.active.fix(f)
	q.Remove(it)
	return it
}

// Remove takes out a request that waits.
func (q *Queue) Remove(it *Item) {
	f := it.flow
	f.items.Remove(it.place)
	it.place = nil
	q.count(f, -1, it)
	if f.items.Len() > 0 {
		q.fat.fix(f)
		return
	}
	q.fat.remove(f)
	f.class.active.remove(f)
	f.class.weights -= f.weight
	if q.n == 0 { // drop rounding errors
		q.cost = 0
		for i := range q.classes {
			q.classes[i].weights = 0
		}
	}
	f.cost = 0
	f.idle = f.class.idle.PushBack(f)
	for i := range q.classes { // forget flows whose tags the virtual time has passed
		c := &q.classes[i]
		for e := c.idle.Front(); e != nil && (c.idle.Len() > maxIdle || e.Value.(*flow).tag <= c.now); e = c.idle.Front() {
			c.drop(e.Value.(*flow))
		}
	}
}

// drop forgets a flow with nothing waiting.
func (c *class) drop(f *flow) {
	if f.idle != nil {
		c.idle.Remove(f.idle)
		f.idle = nil
	}
	delete(c.flows, f.tenant)
}

// Settle corrects the standing of a tenant whose request cost so much more than estimated,
// less if negative.
func (q *Queue) Settle(tenant string, cl Class, more float64) {
	c := &q.classes[cl]
	f := c.flows[tenant]
	if f == nil {
		return
	}
	f.tag = settled(f.tag, c.now, more, f.weight)
	if f.serve >= 0 {
		f.tag = max(f.tag, c.now)
		c.active.fix(f)
	}
	if c.tag = settled(c.tag, q.now, more, c.weight); c.n > 0 {
		c.tag = max(c.tag, q.now)
	}
}

// settled is a tag moved by more tokens, to at most maxCost ahead of now.
func settled(tag, now, more, weight float64) float64 {
	return min(tag+more/weight, max(tag, now+maxCost/weight))
}

// Ahead estimates how many tokens are served before a request that comes now: what waits of
// its tenant, over the tenant's share, and at most everything.
func (q *Queue) Ahead(it *Item) float64 {
	c := &q.classes[it.Class]
	classes, tenants, own, weight := 0.0, c.weights, 0.0, max(it.Weight, 0)
	if weight == 0 {
		weight = 1
	}
	for i := range q.classes {
		if o := &q.classes[i]; o == c || o.n > 0 {
			classes += o.weight
		}
	}
	if f := c.flows[it.Tenant]; f != nil && f.serve >= 0 {
		own = f.cost
	} else {
		tenants += weight
	}
	share := c.weight / classes * min(weight/tenants, 1)
	return math.Min(q.cost, own/share) + it.Cost
}
